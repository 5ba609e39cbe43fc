"""Engines of nodes that NCCL's rail connects, on the fake NCCL and the fake driver; see ``scenarios.py``."""

from __future__ import annotations

import os

import numpy as np
import scenarios  # says where the others are

# isort: split
from nodes_scenarios import SIZES, Rank, check_collectives
from ranks import threads
from stage import memory, play, scenario, until

from tide_strategies.collectives import signals
from tide_strategies.collectives.schedule import Item
from tide_strategies.errors import TidePeerError, TideTimeoutError
from tide_strategies.runtime.cuda.nccl_rail import connect_rail
from tide_strategies.topology import Topology


@scenario
def collectives_of_nodes_run_over_it():
    """All-gathers land every shard, reductions give the bytes of the CPU's executor, and in the end nothing is left."""
    library = scenarios.load()
    for shape, out_item, slot_reuse, chunk in [((2, 1), Item.F32, False, 4096), ((2, 2), Item.BF16, True, 64)]:

        def work(exchange, rank, *case):
            return check_collectives(rank, exchange, *case, connect=connect_rail)

        case = shape, out_item, slot_reuse, chunk
        found = threads(shape[0] * shape[1], lambda e, r, c=case: work(e, r, *c), timeout_s=60.0)
        assert not any(isinstance(f, Exception) for f in found), found
        assert library.fake_nccl_calls(b"ncclPutSignal") > 0
        assert library.fake_nccl_open() == 0


@scenario
def rates_are_measured_over_it():
    """With puts out of memory that NCCL knows; the communicators end with the measurement."""
    from probing_scenarios import Card, check_rates, measured  # imports torch

    library = scenarios.load()
    Card.install(0)
    for form in ((2, 1), (2, 2)):

        def work(exchange, rank, form=form):
            return measured(rank, exchange, form, "cuda ranks: push", rail="nccl_rma")

        before = library.fake_nccl_calls(b"ncclPutSignal")
        found = threads(form[0] * form[1], work, timeout_s=60.0)
        assert not any(isinstance(f, Exception) for f in found), found
        check_rates(found[0], form)
        assert all(rates == found[0] for rates in found)
        assert library.fake_nccl_calls(b"ncclPutSignal") > before
        assert library.fake_nccl_open() == 0


@scenario
def a_rank_that_never_comes_ends_the_others():
    """What the device awaits has its bound with a rail, too, and with it NCCL's part ends on every rank."""
    library = scenarios.load()

    def work(exchange, rank):
        here = Rank(rank, exchange, Topology(2, 1), rank, chunk_bytes=256, timeout_s=1.0, connect=connect_rail)
        here.engine.watchdog._main = 0  # the error rises where a call begins, and nowhere else
        group = here.groups[0]
        if rank == 0:
            output = memory(group.layout.output_items * 4)
            here.reduce(group, [np.ones(s, np.uint16) for s in SIZES], output, Item.F32, 1.0)
        until(lambda: here.engine.watchdog._failure is not None, 20)
        until(lambda: here.rail._domains.main.closed)
        return here.engine.watchdog._failure

    waited, told = threads(2, work)
    assert isinstance(waited, TideTimeoutError), waited
    assert "reduce-scatter of 'group 0'" in str(waited)
    assert "awaits counter arrived[0] of rank 1" in str(waited)
    assert isinstance(told, TidePeerError), told
    assert "rank 0 stopped first" in str(told)
    assert library.fake_nccl_calls(b"ncclCommAbort") == 6
    os._exit(0)  # a stream is blocked for good, as NCCL has it


@scenario
def what_is_taken_for_later_calls_has_its_bound_too():
    """No wait of the engine's own has begun: the streams are blocked in NCCL, one behind the other."""
    scenarios.load()

    def work(exchange, rank):
        here = Rank(rank, exchange, Topology(2, 1), rank, chunk_bytes=256, timeout_s=0.5, connect=connect_rail)
        here.engine.watchdog._main = 0
        if rank == 0:
            counter = here.engine.book.counter(signals.credit(0))
            here.rail.take(1, counter, 1, here.stream("network"))
        until(lambda: here.engine.watchdog._failure is not None, 20)
        return str(here.engine.watchdog._failure)

    waited, told = threads(2, work)
    assert "rank 0 awaits 1 signal(s) of credit[0] of rank 1 on the rail" in waited, waited
    assert "rank 0 stopped first" in told, told
    os._exit(0)


if __name__ == "__main__":
    play(globals())
