"""Faults of what is around schedules: lifetimes and the order of calls. Each changes the steps of rank 0's caller."""

from __future__ import annotations

from collections.abc import Callable

from tide_strategies.verify.steps import Act, Do, Join, Step

Break = Callable[[list[Step]], None]


def without_join(stream: str) -> Break:
    """The caller does not wait for a stream of the first call that it waits for at all."""

    def broken(steps: list[Step]) -> None:
        steps.remove(next(s for s in steps if isinstance(s, Join) and s.key[0] == "end" and s.key[2] == stream))

    return broken


def vacate_first(steps: list[Step]) -> None:
    """Each landing is vacated before its parameters are used."""
    for i, step in enumerate(steps):
        if isinstance(step, Do) and step.stream == "readiness":
            use = max(k for k in range(i) if isinstance(steps[k], Act))
            steps[use], steps[i] = steps[i], steps[use]


def release_gradients_first(steps: list[Step]) -> None:
    """The gradients' storage is filled anew before the call that reads them, which is the first of all."""
    fills = [i for i, s in enumerate(steps) if isinstance(s, Act) and s.action.func.__name__ == "_fill"]
    steps.insert(fills[0] + 1, steps.pop(fills[2]))  # two calls share each


def use_before_it_is_complete(steps: list[Step]) -> None:
    """One thread: the result of the first call is looked at before the stream that completes it has run."""
    use = next(i for i, s in enumerate(steps) if isinstance(s, Act) and s.action.func.__name__ != "_fill")
    steps[use - 1], steps[use] = steps[use], steps[use - 1]


def swap_calls(steps: list[Step]) -> None:
    """One thread: the second call comes before the first."""
    calls = [i for i, s in enumerate(steps) if isinstance(s, Do)]
    first = [i for i in calls if steps[i].call.number == 1]
    second = [i for i in calls if steps[i].call.number == 2]
    for a, b in zip(first, second, strict=True):
        steps[a], steps[b] = steps[b], steps[a]


def skip_call(steps: list[Step]) -> None:
    """One thread: the second call is left out."""
    steps[:] = [s for s in steps if not (isinstance(s, Do) and s.call.number == 2)]
