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
        wait_seconds: the part of ``seconds`` spent waiting for peers; 0.0 under stock, where it cannot be told apart,
            and on a GPU, where the device waits and not the calling thread (:class:`ExposedStats`).
        slot_wait_seconds: the part of ``wait_seconds`` before an all-gather could write: for slots that peers have not
            vacated yet, and across nodes for stages and for shards that are passed on.
        bytes: bytes this rank moved (all-gather: its shards; reduce-scatter: its slices to peers).
        reused: uses of unsharded parameters that were still there, in the place of an all-gather.
        ahead: all-gathers in backwards that were issued, or saved, ahead of a reduction's network phase.
        stock_calls: calls of a TIDE group that ran as stock for a reason of that call (see ``stock_reason``).
        stock_reason: code and words of the latest such call.
    """

    calls: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    slot_wait_seconds: float = 0.0
    bytes: int = 0
    reused: int = 0
    ahead: int = 0
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
        rail: what connects the nodes: "local" (memory that they share), "p2p" (messages), "nccl_rma" (puts through
            NCCL), or "none" (one node).
        schedule: "direct" (one node), "two-level" (several), or "lane" (several with one rank on each).
        placement: why this topology and this rail, in words.
        multicast: whether one copy reaches all GPUs of a node, and why not, in words; empty for CPU ranks.
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
    rail: Literal["", "none", "local", "p2p", "nccl_rma"] = ""
    schedule: Literal["", "direct", "two-level", "lane"] = ""
    placement: str = ""
    multicast: str = ""
    calibration: str = ""
    all_gather: CollectiveStats = field(default_factory=CollectiveStats)
    reduce_scatter: CollectiveStats = field(default_factory=CollectiveStats)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExposedStats:
    """How long computing waited for collectives on a GPU, in the backwards (with their forwards) that were sampled.

    Args:
        seconds: of the compute stream, in all samples that have been read.
        sampled: how many these are.
        backwards: how many there were.
    """

    seconds: float
    sampled: int
    backwards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """How the reduce-scatters of one process group are cut up and staffed, and what that was solved from.

    Args:
        ranks: of the process group.
        groups: parameter groups on TIDE's path there.
        knobs: by name, as the options of the reduce-scatter; a pinned plan may state them.
        stated: names of the knobs that the options state.
        source: of the rates: "measured", "cache", or "built in" for this kind of device.
        rates: by name (``tide_strategies.planner.rates.Rates``), bytes/s and seconds.
        words: the rates that matter, in words.
    """

    ranks: int
    groups: int
    knobs: dict[str, int]
    stated: list[str]
    source: str
    rates: dict[str, Any]
    words: str

    def __str__(self) -> str:
        knobs = ", ".join(f"{k} {v}{' (stated)' if k in self.stated else ''}" for k, v in self.knobs.items())
        return f"plan of {self.groups} groups on {self.ranks} ranks: {knobs}; rates ({self.source}): {self.words}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TideReport:
    """State of TIDE on this rank.

    Args:
        installed: whether the first forward has installed TIDE (before it, ``groups`` is empty).
        status: one line in words.
        arena_bytes: bytes of the arena by part ("ring", "pinned" for groups that stay unsharded, "staging",
            "control"): of shared memory, counted once a node; on GPU ranks of this rank's device memory.
        pinned_bytes: bytes of pinned host memory of this rank by part, of messages between GPU nodes (rail "p2p"):
            "stage" and "inbox" for what peers send, "pieces" for what is sent, "control" for cells; else empty.
        groups: one entry per parameter group, in module order.
        plans: one entry per process group whose groups run on TIDE's path.
        exposed: of GPU ranks; None on CPU ranks, where all of the collectives' time is exposed.
    """

    installed: bool
    status: str
    arena_bytes: dict[str, int] = field(default_factory=dict)
    pinned_bytes: dict[str, int] = field(default_factory=dict)
    groups: tuple[GroupReport, ...] = ()
    plans: tuple[PlanReport, ...] = ()
    exposed: ExposedStats | None = None

    @property
    def waits(self) -> dict[str, float] | None:
        """Seconds that the calling thread waited for peers, by cause; None on GPU ranks, where the device waits.

        "slots": until an all-gather may write (``slot_wait_seconds``). "shards": until all ranks' shards have landed.
        "gradients": in reduce-scatters, for what peers contribute and for room in their staging.
        """
        if self.exposed is not None:
            return None
        slots = sum(g.all_gather.slot_wait_seconds for g in self.groups)
        return {
            "slots": slots,
            "shards": sum(g.all_gather.wait_seconds for g in self.groups) - slots,
            "gradients": sum(g.reduce_scatter.wait_seconds for g in self.groups),
        }

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries and lists (JSON-ready)."""
        return asdict(self)

    def _placements(self) -> list[str]:
        """A line for each way in which groups are placed; which groups, only if they differ."""
        placed: dict[tuple[str, ...], list[str]] = {}
        for g in self.groups:
            if g.topology:
                placed.setdefault((g.topology, g.rail, g.schedule, g.placement, g.multicast), []).append(g.name)
        return [
            f"  nodes x ranks {topology}, rail {rail}, schedule {schedule} ({why})"
            + (f", multicast {multicast}" if multicast else "")
            + (f": {', '.join(names)}" if len(placed) > 1 else "")
            for (topology, rail, schedule, why, multicast), names in placed.items()
        ]

    def __str__(self) -> str:
        lines = [f"TIDE: {self.status}"]
        arena = "shared memory of this node" if self.exposed is None else "device memory of this rank"
        memory = {arena: self.arena_bytes, "pinned host memory of this rank": self.pinned_bytes}
        for what, by_part in memory.items():
            if by_part:
                lines.append(f"  {what}: " + ", ".join(f"{k} {v / 2**20:.1f} MiB" for k, v in by_part.items()))
        lines += self._placements()
        lines += [f"  {plan}" for plan in self.plans]
        if self.exposed is not None and self.exposed.sampled:
            exposed_ms = self.exposed.seconds / self.exposed.sampled * 1e3
            lines.append(
                f"  computing waited {exposed_ms:.3f} ms for collectives in a forward and backward "
                f"(mean of {self.exposed.sampled} of {self.exposed.backwards})"
            )
        if self.waits is not None and any(g.path == "tide" for g in self.groups):
            causes = ", ".join(f"{seconds * 1e3:.1f} ms for {cause}" for cause, seconds in self.waits.items())
            lines.append(f"  waited for peers: {causes}")
        for g in self.groups:
            ag, rs = g.all_gather, g.reduce_scatter
            ahead = f", {ag.ahead} ahead of a network phase" if ag.ahead else ""
            lines.append(
                f"  {g.name}: {g.path} ({g.code}: {g.reason}), {g.parameters} parameters, "
                f"{g.unsharded_bytes / 2**20:.1f} MiB in {g.storage} memory; "
                f"{ag.calls} all-gathers ({ag.reused} saved{ahead}) {ag.seconds * 1e3:.1f} ms, "
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
