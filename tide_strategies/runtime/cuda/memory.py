"""Device memory that ranks of one host can address."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tide_strategies._native import cuda
from tide_strategies.runtime.bootstrap import Exchange, agree, share_fd


@dataclass(frozen=True)
class SharedAllocation:
    """One allocation per rank, all of the same size, mapped by all ranks that share memory.

    Args:
        own: this rank's allocation.
        mappings: every rank's, as mapped in this process, in rank order; gone with this object. None where this rank
            does not reach it.
        multicast: what stands for the memory of all who share it, if they have that.
    """

    own: cuda.Allocation
    mappings: tuple[cuda.Mapping | None, ...]
    multicast: cuda.Multicast | None = None

    @property
    def addresses(self) -> list[int]:
        """Where each rank's memory begins in this process; 0 where it is not mapped."""
        return [0 if m is None else m.address for m in self.mappings]

    @property
    def everywhere(self) -> int:
        """The address that stands for the memory of all who share it."""
        assert self.multicast is not None
        return self.multicast.address

    def mapping(self, rank: int) -> cuda.Mapping:
        """The memory of a rank that this one reaches."""
        found = self.mappings[rank]
        assert found is not None
        return found


def share_allocation(
    exchange: Exchange, rank: int, size: int, timeout_s: float, device: int, nbytes: int, sharing: int = 0
) -> SharedAllocation:
    """Allocate ``nbytes`` on every rank's device and map them on all ranks that share memory. Collective.

    Args:
        exchange: all-gathers a small payload among the ``size`` ranks, in rank order.
        rank: this rank.
        size: how many ranks there are.
        timeout_s: bound of every step.
        device: this rank's device.
        nbytes: of each rank.
        sharing: so many consecutive ranks map each other's; 0: all do.

    Raises:
        TideArenaError: on every rank alike, if one could not allocate, share or map.
    """
    own, error = None, None
    try:
        own = cuda.Allocation(device, nbytes)
    except (OSError, MemoryError, RuntimeError) as e:
        error = f"{type(e).__name__}: {e}"
    agree(exchange, rank, error, f"allocating {nbytes} bytes of device memory", code="TIDE-F021")
    assert own is not None
    sharing = sharing or size
    first = rank - rank % sharing
    mappings: list[cuda.Mapping | None] = [None] * size
    for place in range(sharing):
        mappings[first + place] = _map_from(exchange, rank, size, timeout_s, device, own, sharing, place)
    return SharedAllocation(own, tuple(mappings))


def _map_from(
    exchange: Exchange,
    rank: int,
    size: int,
    timeout_s: float,
    device: int,
    own: cuda.Allocation,
    sharing: int,
    place: int,
) -> cuda.Mapping:
    """Of each ``sharing`` consecutive ranks, map the allocation of number ``place`` on all."""
    firsts = range(0, size, sharing)

    def turned(payload: bytes) -> list[bytes]:  # share_fd hands out the descriptor of the first of them
        replies = exchange(payload)
        return [replies[first + (place + i) % sharing] for first in firsts for i in range(sharing)]

    own_place = rank % sharing
    at = rank - own_place + (own_place - place) % sharing
    mapping, error, exported = None, None, -1

    def export() -> int:
        nonlocal exported
        exported = own.export_fd()
        return exported

    fd, _ = share_fd(turned, at, size, timeout_s, export, sharing)
    try:
        source = own if own_place == place else cuda.Allocation.from_fd(fd, own.bytes, device)
        mapping = cuda.Mapping(source, device)
    except (OSError, MemoryError, RuntimeError) as e:
        error = f"{type(e).__name__}: {e}"
    finally:
        os.close(fd)
    agree(exchange, rank, error, f"mapping the device memory of rank {place}{' of each node' * (sharing < size)}")
    assert mapping is not None
    return mapping
