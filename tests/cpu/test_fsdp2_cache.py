"""How many all-gathers a step takes, and how many the slots save."""

from __future__ import annotations

from harness import launch
from models import Case, build, train

from tide_strategies import apply_tide


def _counts(rank: int, world: int, cases: list[Case]) -> list[dict[str, tuple[int, int]]]:
    out = []
    for case in cases:
        model = build(case, world)
        handle = apply_tide(model, {"timeout_s": 30, **case.config})
        train(model, case, rank)
        report = handle.report()
        out.append({g.name: (g.all_gather.calls, g.all_gather.reused) for g in report.groups})
        handle.close()
    return out


def test_slots_save_the_all_gathers_of_values_that_are_still_there() -> None:
    off = Case("off", steps=2, config={"all_gather.cache": "off"})
    turnaround = Case("turnaround", steps=2)
    roomy = Case("roomy", steps=2, config={"all_gather.slots": 3})
    micro = Case("micro", steps=2, accumulate=3, config={"all_gather.cache": "microbatch", "all_gather.slots": 4})
    counts = launch(2, _counts, [off, turnaround, roomy, micro])[0]
    blocks = [f"blocks.{i}" for i in range(4)]
    # two steps, each gathers a block for its forward and again for its backward; the root stays throughout
    assert [counts[0][b] for b in blocks] == [(4, 0)] * 4
    assert counts[0]["(root)"] == (2, 0)
    # the last two blocks of the forward are still in the two slots when the backward begins
    assert [counts[1][b] for b in blocks] == [(4, 0), (4, 0), (2, 2), (2, 2)]
    assert [counts[2][b] for b in blocks] == [(4, 0), (2, 2), (2, 2), (2, 2)]
    # everything fits: one all-gather per optimizer step, five more uses saved (3 forwards, 3 backwards)
    assert [counts[3][b] for b in blocks] == [(2, 10)] * 4
    assert counts[3]["(root)"] == (2, 4)
