"""What is measured before the first step: the machine's rates, and then both paths of each parameter group.

Both paths run on the ranks and memory that will train, as they will in training: ours through the group's own path,
stock's as FSDP2 does it (pack, gather, copy out; pack with upcast, reduce-scatter). Every number is the slowest rank's,
so all ranks choose alike.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tide_strategies.config import TideConfig
from tide_strategies.fsdp2.access import unsharded_dtype
from tide_strategies.fsdp2.connect import Member
from tide_strategies.fsdp2.eligibility import REDUCIBLE
from tide_strategies.fsdp2.facts import facts_of
from tide_strategies.fsdp2.probing import measure_rates
from tide_strategies.planner import calibrate as plans
from tide_strategies.planner.knobs import Knobs
from tide_strategies.planner.rates import Rates
from tide_strategies.runtime import bootstrap
from tide_strategies.runtime.exchange import Exchange, exchange_json, process_group_exchange
from tide_strategies.runtime.group import Tally
from tide_strategies.runtime.hosts import hosts_of

_log = logging.getLogger("tide_strategies")

#: Seconds that measuring rates may take, if the budget is that large.
_MOST_FOR_RATES_S = 1.0
#: Timed calls of each collective at first, and at most; a lead larger than this factor needs no more than the first.
_FIRST, _MOST, _CLEAR = 3, 12, 1.25


@dataclass(frozen=True)
class Calibrated:
    """What is known of a group's two paths, alike on all ranks of its process group.

    Args:
        times: of both.
        source: "measured", "cache", or "estimated" from other sizes where the budget did not reach this one.
        gathers: all-gathers in a step.
    """

    times: plans.Measured
    source: str
    gathers: int

    @property
    def ours(self) -> bool:
        """Whether TIDE is not slower."""
        return self.times.gain(self.gathers) >= 0

    def words(self) -> str:
        """Milliseconds a step of the two."""
        tide, stock = (t.per_step(self.gathers) * 1e3 for t in (self.times.tide, self.times.stock))
        return f"{tide:.3f} ms a step with TIDE, {stock:.3f} ms with stock ({self.source})"


class Calibration:
    """Of one process group: what its cache knows, what is measured in addition, and the keeping of both.

    Collective, as everything here is: all ranks of ``ranks`` do the same in the same order.

    Args:
        ranks: the process group.
        device: its ranks' device.
        config: the options.
    """

    def __init__(self, ranks: dist.ProcessGroup, device: torch.device, config: TideConfig) -> None:
        self._ranks, self._device, self._config = ranks, device, config
        backend = _backend(ranks, device)
        #: Whether stock's collectives can be timed, and with them anything.
        self.possible = device.type != "cuda" or backend == "nccl"
        if not self.possible:
            # Gloo does not refuse tensors on a GPU: its all-gather and reduce-scatter end the process.
            if ranks.rank() == 0:
                _log.warning(
                    "TIDE: stock collectives cannot be timed on GPUs over %s, so plan: auto uses TIDE; plan: tide says "
                    "so without this line",
                    backend,
                )
            return
        self._exchange = process_group_exchange(ranks, config.timeout_s, "the calibration of collectives")
        self._facts = facts_of(ranks, device, config)
        index = torch.cuda.current_device() if device.type == "cuda" else 0
        stated = exchange_json(self._exchange, [bootstrap.host_identity(), index])
        self._facts["hosts"] = str([len(host) for host in hosts_of([identity for identity, _ in stated])])
        self._facts["devices"] = str([at for _, at in stated])
        #: Seconds that this rank has spent on measuring: "rates" and "groups", as far as either was measured.
        self.spent_s: dict[str, float] = {}
        self._where = plans.folder(config.calibration.cache)
        self._known, alike = _known(self._exchange, ranks.rank(), self._facts, self._where)
        if not alike:
            self._where = None  # rank 0's facts would vouch for what was measured with ranks unlike it

    def rates(self) -> tuple[Rates | None, str]:
        """The machine's rates and where they are from: "cache" or "measured"; None where they cannot be told."""
        if not self.possible:
            return None, ""
        if self._known.rates is not None:
            return self._known.rates, "cache"
        budget_s, start = min(self._config.calibration.budget_s / 2, _MOST_FOR_RATES_S), time.perf_counter()
        if self._ranks.rank() == 0:
            _log.info("TIDE: measuring rates of copies, sums, waits and rails (in about %g s)", budget_s)
        found = measure_rates(self._exchange, self._ranks, self._device, self._config, budget_s)
        self._spent("rates", time.perf_counter() - start)
        if found is not None:
            self._keep(replace(self._known, rates=found))
        return found, "measured"

    def groups(self, members: Sequence[Member], knobs: Knobs) -> list[Calibrated | None]:
        """Time both paths of connected groups; None where stock cannot be timed.

        Within what measuring rates has left of ``calibration.budget_s``, or half of it if that was more.

        Calls leave no trace in the groups' tallies. At least one geometry is measured, whatever the budget.
        """
        if not self.possible:
            return [None] * len(members)
        known = self._known.groups
        keys = [plans.geometry(m.layout, *_details(m.group), knobs) for m in members]
        todo: dict[str, Member] = {}  # one group of each kind, the largest kinds first
        for key, member in sorted(zip(keys, members, strict=True), key=lambda pair: -_shard_bytes(pair[1])):
            if key not in known:
                todo.setdefault(key, member)
        fresh = self._measured(todo, members)
        if fresh is None:
            return [None] * len(members)
        if fresh:
            self._keep(replace(self._known, groups={**known, **fresh}))
        return [_result(key, member, known, fresh) for key, member in zip(keys, members, strict=True)]

    def _measured(self, todo: Mapping[str, Member], members: Sequence[Member]) -> plans.Table | None:
        """Times of as many kinds of groups as the budget allows; None if stock cannot be timed."""
        whole_s, fresh, start = self._config.calibration.budget_s, plans.Table(), time.perf_counter()
        budget_s = max(whole_s - exchange_json(self._exchange, self.spent_s.get("rates", 0.0))[0], whole_s / 2)
        if todo and self._ranks.rank() == 0:
            _log.info("TIDE: timing %d kinds of parameter groups (at most %g s)", len(todo), budget_s)
        try:
            for number, (key, member) in enumerate(todo.items()):
                left = budget_s - exchange_json(self._exchange, time.perf_counter() - start)[0]
                if fresh and left <= 0:
                    break
                measured = _measure(self._exchange, self._ranks, member, left / (len(todo) - number))
                if measured is None:
                    return None
                fresh[key] = measured
            if todo:
                self._spent("groups", time.perf_counter() - start, f" ({len(fresh)} of {len(todo)} kinds)")
        finally:
            _forget_calls(members)
            if todo and self._device.type == "cuda":
                torch.cuda.empty_cache()  # the model's first step finds the memory as if nothing had been measured
        return fresh

    def _spent(self, what: str, seconds: float, more: str = "") -> None:
        self.spent_s[what] = seconds
        if self._ranks.rank() == 0:
            _log.info("TIDE: measuring %s took %.2f s%s", what, seconds, more)

    def _keep(self, known: plans.Known) -> None:
        self._known = known
        if self._where is not None and self._ranks.rank() == 0:
            problem = plans.store(self._where, self._facts, known)
            if problem:
                _log.warning("TIDE: the calibration could not be kept (%s)", problem)


def _result(key: str, member: Member, known: plans.Table, fresh: plans.Table) -> Calibrated | None:
    gathers = 2 if member.group._reshard_after_forward else 1
    if key in fresh or key in known:
        source = "measured" if key in fresh else "cache"
        return Calibrated(fresh.get(key) or known[key], source, gathers)
    found = plans.estimate({**known, **fresh}, _shard_bytes(member))
    return None if found is None else Calibrated(found, "estimated", gathers)


def _known(exchange: Exchange, rank: int, facts: dict[str, str], where: Path | None) -> tuple[plans.Known, bool]:
    """What rank 0 has under these facts, if all ranks have the same facts; and whether they have."""
    known = plans.Known()
    if rank == 0 and where is not None:
        known, problem = plans.load(where, facts)
        if problem:
            _log.warning("TIDE: what was calibrated before is not used (%s)", problem)
    stated = exchange_json(exchange, {"facts": facts, **plans.plain(known)})
    first = stated[0]["facts"]
    unlike = {k for s in stated for k in {*s["facts"], *first} if s["facts"].get(k) != first.get(k)}
    if unlike:
        if rank == 0 and where is not None:
            _log.info("TIDE: ranks differ in %s, so the calibration is not kept", ", ".join(sorted(unlike)))
        return plans.Known(), False
    return plans.from_plain(stated[0]), True


def _backend(ranks: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of a process group for tensors on a kind of device."""
    by_device = dict(entry.split(":") for entry in str(dist.get_backend_config(ranks)).split(","))
    return by_device.get(device.type, "none")


def _details(group: Any) -> list[object]:
    """What a group's times depend on beside its sizes."""
    return [
        *(
            f"{p._sharded_param_data.dtype} {unsharded_dtype(p)} {p.sharded_param.requires_grad}"
            for p in group.fsdp_params
        ),
        getattr(group, "_reduce_dtype", None),
    ]


def _shard_bytes(member: Member) -> int:
    return sum(member.layout.shard_bytes(p) for p in range(len(member.layout.params)))


def _forget_calls(members: Sequence[Member]) -> None:
    for member in members:
        assert member.binding is not None
        for tally in (member.binding.all_gathers, member.binding.reduce_scatters):
            vars(tally).update(vars(Tally()))


def _measure(exchange: Exchange, ranks: dist.ProcessGroup, member: Member, budget_s: float) -> plans.Measured | None:
    """Time one group's collectives on both paths, in turns. None, on all ranks, if stock's cannot run here."""
    with _own_stream(member.group.device), torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that all its supported versions have
        calls = _calls(ranks, member)
        start, error = time.perf_counter(), ""
        try:
            for call in calls:  # kernels are compiled, buffers found, pages touched
                _timed(exchange, member.group.device, call)
        except (RuntimeError, ValueError, TypeError) as e:
            if type(e).__module__.startswith("tide_strategies"):
                raise
            error = f"{type(e).__name__}: {e}"
        if any(exchange_json(exchange, error)):
            # Alike on all ranks; those without an error of their own were told of one.
            why = error or "an error on another rank"
            _log.warning("TIDE: collectives cannot be timed here, so plan: auto uses TIDE (%s)", why)
            return None
        samples: list[list[float]] = [[] for _ in calls]
        while True:
            for _ in range(_FIRST):
                for call, times in zip(calls, samples, strict=True):
                    times.append(_timed(exchange, member.group.device, call))
            stated = exchange_json(exchange, [samples, time.perf_counter() - start])
            medians = [_median_of_slowest([s[0][i] for s in stated]) for i in range(len(calls))]
            tide, stock = plans.Timing(medians[0], medians[1]), plans.Timing(medians[2], medians[3])
            clear = not 1 / _CLEAR < tide.per_step(2) / max(stock.per_step(2), 1e-9) < _CLEAR
            if clear or len(samples[0]) >= _MOST or stated[0][1] > budget_s:
                items = sum(member.layout.shard_items(p) for p in range(len(member.layout.params)))
                return plans.Measured(tide, stock, _shard_bytes(member), items)


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Collectives run on streams of their own; the program's is often the default one."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def _median_of_slowest(by_rank: Sequence[Sequence[float]]) -> float:
    return statistics.median(max(times) for times in zip(*by_rank, strict=True))


def _timed(exchange: Exchange, device: torch.device, call: Callable[[], None]) -> float:
    exchange(b"")  # all ranks begin together
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _calls(ranks: dist.ProcessGroup, member: Member) -> list[Callable[[], None]]:
    """Our all-gather and reduce-scatter, then stock's."""
    group, layout, binding = member.group, member.layout, member.binding
    assert binding is not None
    assert binding.path is not None
    path, params, world, device = binding.path, group.fsdp_params, ranks.size(), group.device
    shards = [p._sharded_param_data for p in params]
    trained = tuple(i for i, p in enumerate(params) if p.sharded_param.requires_grad)
    dtypes = {unsharded_dtype(params[i]) for i in trained}
    grads: list[torch.Tensor] = []
    if len(dtypes) == 1 and dtypes <= REDUCIBLE.keys():
        dtype = next(iter(dtypes))
        grads = [torch.zeros(params[i]._orig_size, dtype=dtype, device=device) for i in trained]
    reduce_dtype = getattr(group, "_reduce_dtype", None) or (grads[0].dtype if grads else None)
    items = sum(layout.shard_items(i) for i in trained)

    def our_gather() -> None:
        path.all_gather(group, shards, None)
        path.wait()
        path.vacate()

    def our_reduction() -> None:
        if grads:
            output = torch.empty(items, dtype=reduce_dtype, device=device)
            path.reduce_scatter(trained, grads, output, float(world))

    def stock_gather() -> None:
        sizes = [layout.shard_bytes(i) for i in range(len(params))]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        places = [
            b.view(unsharded_dtype(p)) if n else b.view(torch.uint8)
            for b, n, p in zip(packed.split(sizes), sizes, params, strict=True)
        ]
        torch._foreach_copy_(
            [v for v, n in zip(places, sizes, strict=True) if n], [s for s, n in zip(shards, sizes, strict=True) if n]
        )
        gathered = torch.empty(world * sum(sizes), dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(gathered, packed, group=ranks)
        out = [torch.empty(world, n, dtype=torch.uint8, device=device) for n in sizes]
        torch.split_with_sizes_copy(gathered.view(world, -1), sizes, dim=1, out=out)

    def stock_reduction() -> None:
        if grads:
            packed = torch.empty(world * items, dtype=reduce_dtype, device=device)
            output = torch.empty(items, dtype=reduce_dtype, device=device)
            torch._chunk_cat(grads, dim=0, num_chunks=world, out=packed.view(world, -1))
            dist.reduce_scatter_tensor(output, packed, op=dist.ReduceOp.SUM, group=ranks)

    return [our_gather, our_reduction, stock_gather, stock_reduction]
