"""NVSwitch multicast: one store that reaches every GPU of a node, and one load that adds up what they all hold.

Whether it may be used is decided in one place, ``cuda.multicast_refusal``: the native core asks it before any call of
the driver that touches multicast. An all-gather whose landing is addressed through :func:`share_multicast` writes each
shard once (its schedule is the one of a shared landing); a landing kernel reads a node's sum with one load
(:func:`landing_kernel`). :func:`why_unicast` says for all ranks alike whether they are to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from tide_strategies._native import cuda
from tide_strategies.collectives.schedule import Item
from tide_strategies.runtime.bootstrap import Exchange, agree, share_fd
from tide_strategies.runtime.cuda.memory import SharedAllocation
from tide_strategies.runtime.cuda.nvrtc import compile_cuda
from tide_strategies.topology import Topology

#: Compiles source for an architecture with macros (``compile_cuda``).
Compiler = Callable[[str, str, tuple[str, ...]], bytes]

_ENTRY = "land_multimem"
#: Threads of a block: four loads a thread make 32 KiB on the way in a block.
_THREADS = 512
#: Elements of a tile: every thread of a block has work twice.
_TILE = 2 * _THREADS * 4 * 4
#: Addresses that the kernel takes (its source has as many parameters).
_POINTERS = 4
#: With fewer ranks a node, one copy to each peer writes as little as one to all, and the own memory is written once.
_WORTHWHILE = 3


def multicast_facts(device: int) -> dict[str, str]:
    """What the other ranks must know to decide on multicast, as plain JSON values. Touches nothing of multicast."""
    return {"refusal": cuda.multicast_refusal(device), "uuid": str(cuda.device_info(device)["uuid"])}


def why_unicast(facts: Sequence[dict[str, Any]], topology: Topology, wanted: bool | Literal["auto"]) -> str:
    """Why ranks with these facts do without multicast, in words; empty if they are to use it.

    Args:
        facts: :func:`multicast_facts` of all ranks, in order.
        topology: their nodes.
        wanted: option ``all_gather.multicast``.
    """
    if wanted is False:
        return "all_gather.multicast is off"
    if topology.local_ranks < 2:
        return "a node has one rank"
    refused = next((f"rank {r}: {f['refusal']}" for r, f in enumerate(facts) if f["refusal"]), "")
    if refused:
        return refused
    nodes = [topology.node_ranks(topology.rank(n, 0)) for n in range(topology.nodes)]
    if any(len({facts[r]["uuid"] for r in ranks}) < len(ranks) for ranks in nodes):
        return "several ranks share a GPU"
    if wanted == "auto" and topology.local_ranks < _WORTHWHILE:
        return f"a node has {topology.local_ranks} ranks, which gain nothing by it"
    return ""


def share_multicast(
    exchange: Exchange,
    rank: int,
    size: int,
    timeout_s: float,
    device: int,
    shared: SharedAllocation,
    sharing: int = 0,
) -> cuda.Multicast:
    """Join the ranks' memory of ``shared`` in a multicast object for each node and map it. Collective.

    ``shared`` must have been made with ``cuda.Multicast.whole_bytes(device, sharing, nbytes)`` bytes.

    Args:
        exchange: all-gathers a small payload among the ``size`` ranks, in rank order.
        rank: this rank.
        size: how many ranks there are.
        timeout_s: bound of every step.
        device: this rank's device; those of a node differ.
        shared: the memory to join.
        sharing: so many consecutive ranks are a node; 0: all are.

    Raises:
        TideArenaError: on every rank alike, if multicast is refused on one of them, or a step fails there.
    """

    sharing = sharing or size
    first = rank - rank % sharing

    def step(what: str, work: Callable[[], None] | None = None, facts: str = "") -> list[str]:
        """Do it on this rank; nobody goes on before all have."""
        error = None
        try:
            if work is not None:
                work()
        except (OSError, ValueError, RuntimeError) as e:
            error = f"{type(e).__name__}: {e}"
        return agree(exchange, rank, error, what, facts)

    step("using multicast", lambda: _require(device))
    uuids = step("using multicast", facts=str(cuda.device_info(device)["uuid"]))
    alone = len(set(uuids[first : first + sharing])) == sharing
    step("using multicast", None if alone else lambda: _refuse("several ranks share a GPU"))
    nbytes, made = shared.own.bytes, []

    def create() -> int:
        made.append(cuda.Multicast(device, sharing, nbytes))
        return made[0].export_fd()

    fd, _ = share_fd(exchange, rank, size, timeout_s, create, sharing)
    try:
        if rank != first:
            take = partial(cuda.Multicast.from_fd, fd, device, sharing, nbytes)
            step("taking the multicast object", lambda: made.append(take()))
        else:
            step("taking the multicast object")
    finally:
        os.close(fd)
    multicast = made[0]
    step("adding a device to the multicast object", multicast.add_device)
    step("binding memory to the multicast object", lambda: multicast.bind(shared.own))
    step("mapping the multicast object", multicast.map)
    return multicast


def _require(device: int) -> None:
    refusal = cuda.multicast_refusal(device)
    if refusal:
        _refuse(refusal)


def _refuse(words: str) -> None:
    raise RuntimeError(words)


@dataclass
class LandingKernel:
    """A loaded landing kernel, with what a native launch needs (``runtime.cuda.group.SumKernel``).

    A tile is a row of four int64: element offset in the output, elements, number of the address, element offset from
    it. The addresses are multicast ones, and a load adds up what all GPUs of the node hold there.
    """

    module: cuda.Kernel = field(repr=False)
    #: The driver's handle; valid as long as this object lives.
    function: int = field(init=False)
    threads: int = _THREADS
    shared_bytes: int = 0
    tile: int = _TILE
    pointers: int = _POINTERS
    extra_null_pointers: int = 0

    def __post_init__(self) -> None:
        self.function = self.module.function


def landing_kernel(
    device: int, partial: Item, output: Item, accumulate: bool, compiler: Compiler = compile_cuda
) -> LandingKernel:
    """The landing kernel for one device (paper, section 4.2): ``out = [out +] sum * factor``, added by the switch.

    fp32 partials keep the sum in fp32. bf16 ones are added in fp32, and the switch rounds that sum to bf16 (paper,
    section 2.3), so they suit only where nothing is added to it afterwards.

    Raises:
        RuntimeError: multicast may not be used on the device.
        KernelUnavailableError: the kernel cannot be compiled here.
    """
    for name, item in (("partial", partial), ("output", output)):
        if item not in (Item.F32, Item.BF16):
            raise ValueError(f"{name} is {item.value}; the landing kernel has f32 and bf16")
    _require(device)
    major, minor = cuda.device_info(device)["compute_capability"]
    image = compiler(cuda.landing_source(), f"sm_{major}{minor}", landing_macros(partial, output, accumulate))
    return LandingKernel(cuda.Kernel(device, image, _ENTRY))


def landing_macros(partial: Item, output: Item, accumulate: bool) -> tuple[str, ...]:
    """What to define when the landing kernel's source is compiled."""
    chosen = {
        "TIDE_PARTIAL_BF16": partial is Item.BF16,
        "TIDE_OUTPUT_BF16": output is Item.BF16,
        "TIDE_ACCUMULATE": accumulate,
    }
    return tuple(name for name, on in chosen.items() if on)
