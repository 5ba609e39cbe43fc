import sys

sys.path.insert(0, "tests/cpu")
from harness import launch
import ahead_cases


def job(rank, world, names):
    out = {}
    import traceback, time

    for n in names:
        t = time.time()
        try:
            out[n] = (ahead_cases._outcome(ahead_cases.AHEAD[n], rank), time.time() - t)
        except BaseException:
            out[n] = (traceback.format_exc(), 0)
    return out


if __name__ == "__main__":
    names = sys.argv[1:] or list(ahead_cases.AHEAD)
    r = launch(4, job, names, timeout=150)
    for n in names:
        print("==", n)
        o, t = r[0][n]
        if isinstance(o, str):
            print(o)
            continue
        print(
            f"{t:.2f}s",
            o.events,
            "\n   plain",
            o.plain_events,
            "\n  ",
            o.same_values,
            o.ring,
            o.counted,
            all(x[n][0].events == o.events for x in r),
            all(x[n][0].same_values for x in r),
        )
