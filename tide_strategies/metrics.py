"""Numbers for experiment trackers: what the report's totals have grown by, per step, under names that stay."""

from __future__ import annotations

from collections.abc import Callable

from tide_strategies.report import TideReport

#: Names that :meth:`StepMetrics.collect` gives, with their units; on GPU ranks without the waits.
METRICS = {
    "tide/collectives_ms": "milliseconds a step that the calling thread spent in collectives (CPU: all of it exposed)",
    "tide/wait_ms": "the part of it spent waiting for peers, the sum of the next three (CPU only: a GPU itself waits)",
    "tide/wait_slots_ms": "until an all-gather could write, since peers still used the slot (CPU only)",
    "tide/wait_shards_ms": "until the shards of all ranks had landed (CPU only)",
    "tide/wait_gradients_ms": "in reduce-scatters, for peers' gradients and for room to hand in the own (CPU only)",
    "tide/exposed_ms": "milliseconds a step that computing waited for collectives (GPU: in sampled steps)",
    "tide/moved_mib": "MiB a step that this rank moved",
    "tide/all_gathers": "all-gathers a step",
    "tide/all_gathers_saved": "all-gathers a step that values still in a slot have saved",
    "tide/reduce_scatters": "reduce-scatters a step",
    "tide/stock_calls": "calls a step of TIDE groups that ran as stock",
    "tide/groups_tide": "parameter groups on TIDE's path",
    "tide/groups_stock": "parameter groups on stock's path",
    "tide/arena_mib": "MiB of shared memory: on the CPU of all ranks of the host together",
}
_MIB = 2**20
#: Totals beside the metrics: how many backwards there were, and of how many the exposed time is.
_SAMPLED, _BACKWARDS = "sampled", "backwards"


class StepMetrics:
    """Differences between reports.

    Args:
        report: gives the present report (``handle.report``).
    """

    def __init__(self, report: Callable[[], TideReport]) -> None:
        self._report = report
        self._last: dict[str, float] = {}

    def collect(self, steps: int) -> dict[str, float]:
        """``METRICS``, averaged over the ``steps`` since the last call; empty before TIDE is installed.

        On GPU ranks the waits are left out: they happen on the device and are part of ``tide/exposed_ms``.

        Raises:
            ValueError: ``steps`` is below 1.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}")
        report = self._report()
        if not report.installed:
            return {}
        totals = _totals(report)
        # Totals that have shrunk belong to a new installation.
        before = {name: self._last.get(name, 0.0) for name in totals}
        grown = {name: value - before[name] if value >= before[name] else value for name, value in totals.items()}
        self._last = totals
        sampled, backwards = grown.pop(_SAMPLED), grown.pop(_BACKWARDS)
        if report.exposed is not None:  # of the mean sampled backward, for as many as a step has
            grown["tide/exposed_ms"] *= backwards / sampled if sampled else 0.0
        per_step = {name: value / steps for name, value in grown.items()}
        tide = sum(g.path == "tide" for g in report.groups)
        return {
            **per_step,
            "tide/groups_tide": float(tide),
            "tide/groups_stock": float(len(report.groups) - tide),
            "tide/arena_mib": sum(report.arena_bytes.values()) / _MIB,
        }


def _totals(report: TideReport) -> dict[str, float]:
    gathers = [g.all_gather for g in report.groups]
    reductions = [g.reduce_scatter for g in report.groups]
    both = [*gathers, *reductions]
    seconds, exposed = sum(s.seconds for s in both), report.exposed
    return {
        "tide/collectives_ms": seconds * 1e3,
        "tide/exposed_ms": (seconds if exposed is None else exposed.seconds) * 1e3,
        _SAMPLED: float(exposed.sampled if exposed else 0),
        _BACKWARDS: float(exposed.backwards if exposed else 0),
        **_waits(report),
        "tide/moved_mib": sum(s.bytes for s in both) / _MIB,
        "tide/all_gathers": float(sum(s.calls for s in gathers)),
        "tide/all_gathers_saved": float(sum(s.reused for s in gathers)),
        "tide/reduce_scatters": float(sum(s.calls for s in reductions)),
        "tide/stock_calls": float(sum(s.stock_calls for s in both)),
    }


def _waits(report: TideReport) -> dict[str, float]:
    if report.waits is None:
        return {}
    by_cause = {f"tide/wait_{cause}_ms": seconds * 1e3 for cause, seconds in report.waits.items()}
    return {"tide/wait_ms": sum(by_cause.values()), **by_cause}
