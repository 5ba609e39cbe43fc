"""Nodes of GPUs that are connected by messages: engines on the fake driver, gloo between processes."""

from __future__ import annotations

import datetime
import os
import tempfile

import torch.distributed as dist
from nodes_scenarios import check_collectives
from ranks import launch, values
from stage import play, scenario

from tide_strategies.collectives.schedule import Item
from tide_strategies.runtime.cuda.p2p_rail import CudaP2PRail

#: So small that every put goes in several pieces.
PIECE = 192


def connect(exchange, rank, topology, device, timeout_s, book):
    """A rail whose ranks find each other by a file."""
    path = exchange(os.path.join(tempfile.mkdtemp(), "store").encode())[0].decode()
    store = dist.PrefixStore(str(topology.local_of(rank)), dist.FileStore(path, topology.ranks))
    bound = datetime.timedelta(seconds=timeout_s)
    group = dist.ProcessGroupGloo(store, topology.node_of(rank), topology.nodes, bound)
    return CudaP2PRail(group, exchange, rank, topology, device, timeout_s, book, PIECE)


def _check(cases):
    for shape, *how in cases:
        found = values(launch(shape[0] * shape[1], check_collectives, shape, *how, connect))
        assert all(launches > 0 for launches in found)


@scenario
def collectives_of_nodes_run_over_messages():
    """All-gathers land every shard; reductions give the bytes of the CPU's executor."""
    _check([((2, 1), Item.F32, False, 4096), ((2, 2), Item.BF16, True, 64), ((4, 1), Item.F32, True, 64)])


if __name__ == "__main__":
    play(globals())
