"""Gloo groups of rails: made beside the program's own, used by threads, and broken when these have to end."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tide_strategies.topology import Topology

#: An idle receiver waits for as long as the connection lasts; waits for what is due are bounded where they are made.
WHILE_CONNECTED = datetime.timedelta(days=3650)
#: How long a rank that leaves waits for the others to leave as well.
LINGER_S = 5.0


class Closes(Protocol):
    """Something with threads that may be within gloo."""

    def close(self) -> None:
        """End them. Bounded in time, idempotent."""


_open: weakref.WeakSet[Closes] = weakref.WeakSet()


def connect_gloo(group: dist.ProcessGroup, topology: Topology, rank: int, name: str, timeout_s: float) -> Any:
    """A gloo process group of the ranks on the rail of ``rank``, in the order of nodes. Collective among them.

    Args:
        group: the process group of all ranks of ``topology``; its store is where they find each other.
        topology: its nodes.
        rank: this rank in the group.
        name: of all rails of this installation, alike on all ranks and never used before.
        timeout_s: bound of every wait for a peer.

    Raises:
        RuntimeError: gloo cannot connect them.
    """
    store = dist.PrefixStore(f"tide/{name}/{topology.local_of(rank)}", group.get_group_store())
    # A group of its own: what breaks here breaks nothing of the program's, and its tags are nobody else's. Not one of
    # new_group's, whose name an earlier one of the same ranks may have had in the store.
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, topology.node_of(rank), topology.nodes, timeout)


def break_off(group: Any, place: int, tag: int) -> None:
    """Make every wait for a peer end: to gloo, a wait that times out means that the group is broken.

    ``tag`` is one that nobody sends with.
    """
    try:
        work = group.recv([torch.empty(1, dtype=torch.uint8)], place, tag)
        work.wait(datetime.timedelta(milliseconds=1))
    except RuntimeError:
        pass  # as it should


def bytes_at(address: int, nbytes: int) -> memoryview:
    """The bytes at ``address``; whoever uses it keeps the memory."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """The bytes at ``address`` as a tensor; whoever uses it keeps the memory."""
    return torch.frombuffer(bytes_at(address, nbytes), dtype=torch.uint8)


def lost(error: Exception) -> str:
    """What is the matter with a peer, from gloo's error: a predicate whose subject is the rank."""
    return f"cannot be reached any more ({str(error).splitlines()[0][:200]})"


def join(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait for threads to end, for so long in all."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def close_at_exit(rail: Closes) -> None:
    """Close it when the program ends, if nothing else has.

    A thread that is still within gloo when the interpreter finalises would end the process with an abort.
    """
    _open.add(rail)


@atexit.register
def _close_all() -> None:
    for rail in list(_open):
        rail.close()
