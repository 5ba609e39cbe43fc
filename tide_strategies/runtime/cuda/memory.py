"""Device memory that every rank of a node can address."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tide_strategies._native import cuda
from tide_strategies.runtime.bootstrap import Exchange, agree, share_fd


@dataclass(frozen=True)
class SharedAllocation:
    """One allocation per rank, all of the same size, mapped by all ranks.

    Args:
        own: this rank's allocation.
        mappings: every rank's, as mapped in this process, in rank order; gone with this object.
    """

    own: cuda.Allocation
    mappings: tuple[cuda.Mapping, ...]

    @property
    def addresses(self) -> list[int]:
        """Where each rank's memory begins in this process."""
        return [m.address for m in self.mappings]


def share_allocation(
    exchange: Exchange, rank: int, size: int, timeout_s: float, device: int, nbytes: int
) -> SharedAllocation:
    """Allocate ``nbytes`` on every rank's device and map all of them on all ranks. Collective.

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
    mappings: list[cuda.Mapping] = []
    for root in range(size):
        mappings.append(_map_from(exchange, rank, size, timeout_s, device, own, root))
    return SharedAllocation(own, tuple(mappings))


def _map_from(
    exchange: Exchange, rank: int, size: int, timeout_s: float, device: int, own: cuda.Allocation, root: int
) -> cuda.Mapping:
    """Map the allocation of rank ``root`` on every rank."""

    def turned(payload: bytes) -> list[bytes]:  # share_fd hands out the descriptor of its rank 0
        replies = exchange(payload)
        return [*replies[root:], *replies[:root]]

    mapping, error, exported = None, None, -1

    def export() -> int:
        nonlocal exported
        exported = own.export_fd()
        return exported

    fd, _ = share_fd(turned, (rank - root) % size, size, timeout_s, export)
    try:
        source = own if rank == root else cuda.Allocation.from_fd(fd, own.bytes, device)
        mapping = cuda.Mapping(source, device)
    except (OSError, MemoryError, RuntimeError) as e:
        error = f"{type(e).__name__}: {e}"
    finally:
        os.close(fd)
    agree(exchange, rank, error, f"mapping the device memory of rank {root}")
    assert mapping is not None
    return mapping
