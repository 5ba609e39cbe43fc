"""What ran and why: the report that ``handle.report()`` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveStats:
    """Totals of one kind of collective in one group since installation.

    Args:
        calls: number of calls.
        seconds: wall time that the calling thread spent in them: on the CPU all of it exposed, on a GPU the time to
            enqueue them.
        wait_seconds: the part of ``seconds`` spent waiting for peers; 0.0 under stock, where it cannot be told apart.
        bytes: bytes this rank moved (all-gather: its shards; reduce-scatter: its slices to peers).
        reused: uses of unsharded parameters that were still there, in the place of an all-gather.
        stock_calls: calls of a TIDE group that ran as stock for a reason of that call (see ``stock_reason``).
        stock_reason: code and words of the latest such call.
    """

    calls: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes: int = 0
    reused: int = 0
    stock_calls: int = 0
    stock_reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReport:
    """One FSDP2 parameter group: which path it takes, and why.

    Args:
        name: fully qualified name of the module, "(root)" for the root.
        path: "tide" or "stock".
        code: stable code of the verdict ("TIDE-OK", or "TIDE-Fnnn").
        reason: the verdict in words.
        remedy: what to do to accelerate a group on the stock path.
        parameters: number of parameters.
        unsharded_bytes: bytes of the group's landing.
        storage: "ring", "pinned" or "torch".
        topology: nodes x ranks per node of the ranks that the group is sharded over, such as "2x4"; like the next three
            empty on the stock path.
        rail: what connects the nodes: "local" (memory that they share), "p2p" (messages), or "none" (one node).
        schedule: "direct" (one node), "two-level" (several), or "lane" (several with one rank on each).
        placement: why this topology and this rail, in words.
        calibration: what both paths took by themselves, in words; empty if they were not timed (``plan``).
    """

    name: str
    path: Literal["tide", "stock"]
    code: str
    reason: str
    remedy: str
    parameters: int
    unsharded_bytes: int
    storage: Literal["ring", "pinned", "torch"]
    topology: str = ""
    rail: Literal["", "none", "local", "p2p"] = ""
    schedule: Literal["", "direct", "two-level", "lane"] = ""
    placement: str = ""
    calibration: str = ""
    all_gather: CollectiveStats = field(default_factory=CollectiveStats)
    reduce_scatter: CollectiveStats = field(default_factory=CollectiveStats)


@dataclass(frozen=True, kw_only=True, slots=True)
class TideReport:
    """State of TIDE on this rank.

    Args:
        installed: whether the first forward has installed TIDE (before it, ``groups`` is empty).
        status: one line in words.
        arena_bytes: bytes of shared memory by part ("ring", "pinned", "staging", "control"), counted once a node.
        groups: one entry per parameter group, in module order.
    """

    installed: bool
    status: str
    arena_bytes: dict[str, int] = field(default_factory=dict)
    groups: tuple[GroupReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries and lists (JSON-ready)."""
        return asdict(self)

    def _placements(self) -> list[str]:
        """A line for each way in which groups are placed; which groups, only if they differ."""
        placed: dict[tuple[str, str, str, str], list[str]] = {}
        for g in self.groups:
            if g.topology:
                placed.setdefault((g.topology, g.rail, g.schedule, g.placement), []).append(g.name)
        return [
            f"  nodes x ranks {topology}, rail {rail}, schedule {schedule} ({why})"
            + (f": {', '.join(names)}" if len(placed) > 1 else "")
            for (topology, rail, schedule, why), names in placed.items()
        ]

    def __str__(self) -> str:
        lines = [f"TIDE: {self.status}"]
        if self.arena_bytes:
            parts = ", ".join(f"{k} {v / 2**20:.1f} MiB" for k, v in self.arena_bytes.items())
            lines.append(f"  shared memory of this node: {parts}")
        lines += self._placements()
        for g in self.groups:
            ag, rs = g.all_gather, g.reduce_scatter
            lines.append(
                f"  {g.name}: {g.path} ({g.code}: {g.reason}), {g.parameters} parameters, "
                f"{g.unsharded_bytes / 2**20:.1f} MiB in {g.storage} memory; "
                f"{ag.calls} all-gathers ({ag.reused} saved) {ag.seconds * 1e3:.1f} ms, "
                f"{rs.calls} reduce-scatters {rs.seconds * 1e3:.1f} ms"
            )
            if g.calibration:
                lines.append(f"    {g.calibration}")
            if g.remedy:
                lines.append(f"    {g.remedy}")
            for what, stats in (("all-gather", ag), ("reduce-scatter", rs)):
                if stats.stock_calls:
                    lines.append(f"    {stats.stock_calls} {what} calls ran as stock: {stats.stock_reason}")
        return "\n".join(lines)
