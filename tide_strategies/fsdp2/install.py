"""Installation: from an FSDP2 root to groups that use TIDE, agreed on by all ranks.

It runs once, at the root's first forward, when parameters, dtypes and the order of everything are final.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tide_strategies.config import KNOBS, PinnedPlan, TideConfig
from tide_strategies.detect import OK, Verdict, fallback
from tide_strategies.errors import TideArenaError, TideError, TideFallbackError
from tide_strategies.fsdp2 import access, capture
from tide_strategies.fsdp2.agreement import agree_on_groups
from tide_strategies.fsdp2.calibration import Calibrated, Calibration
from tide_strategies.fsdp2.connect import AnyEngine, connect
from tide_strategies.fsdp2.eligibility import group_verdict
from tide_strategies.fsdp2.exposed import ExposedMeter
from tide_strategies.fsdp2.param_group import GroupBinding, measure, restore
from tide_strategies.fsdp2.probing import words
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.knobs import Knobs
from tide_strategies.planner.rates import Rates, built_in
from tide_strategies.report import CollectiveStats, GroupReport, PlanReport
from tide_strategies.runtime.bootstrap import agree
from tide_strategies.runtime.exchange import exchange_json, process_group_exchange
from tide_strategies.runtime.hosts import Placement

_log = logging.getLogger("tide_strategies")


#: Options that change nothing on this kind of device.
_WITHOUT_EFFECT_ON = {
    "cpu": {
        "all_gather.multicast",
        "reduce_scatter.mode",
        "reduce_scatter.sum_ctas",
        "reduce_scatter.landing_ctas",
    },
}


def options_without_effect(*devices: str) -> set[str]:
    """Dotted names of the options that change nothing on some of these kinds of device."""
    return set().union(*(_WITHOUT_EFFECT_ON.get(d, set()) for d in devices))


@dataclass
class InstalledGroup:
    """One parameter group after installation."""

    group: Any
    name: str
    verdict: Verdict
    layout: GroupLayout
    binding: GroupBinding | None = None
    calibrated: Calibrated | None = None
    placement: Placement | None = None

    def report(self) -> GroupReport:
        """The group's entry in the report."""
        path = self.binding.path if self.binding is not None else None
        storage = "torch" if path is None else "pinned" if path.collectives.pinned else "ring"
        place = self.placement if path is not None else None
        return GroupReport(
            name=self.name,
            path="stock" if path is None else "tide",
            code=self.verdict.code,
            reason=self.verdict.reason,
            remedy=self.verdict.remedy,
            parameters=len(self.layout.params),
            unsharded_bytes=self.layout.landing_bytes,
            storage=storage,  # type: ignore[arg-type]
            topology=str(place.topology) if place else "",
            rail=place.rail if place else "",
            schedule=place.schedule if place else "",
            placement=place.why if place else "",
            multicast=place.multicast if place else "",
            calibration=self.calibrated.words() if self.calibrated is not None else "",
            all_gather=CollectiveStats(**vars(self.binding.all_gathers)) if self.binding else CollectiveStats(),
            reduce_scatter=CollectiveStats(**vars(self.binding.reduce_scatters)) if self.binding else CollectiveStats(),
        )


class Installation:
    """TIDE on one FSDP2 root.

    Args:
        root: the outermost module that ``fully_shard`` was applied to.
        config: the options.

    Raises:
        TideMismatchError: ranks have different parameter groups.
        TideFallbackError: ``strict`` and some group is not eligible.
        TideError: parameters are on the meta device.
    """

    def __init__(self, root: FSDPModule, config: TideConfig) -> None:
        self.config = config
        self.engines: list[AnyEngine] = []
        self.meter: ExposedMeter | None = None
        #: Of each engine.
        self.plans: list[PlanReport] = []
        _check_materialised(root)
        access.lazy_init(root)
        groups = access.param_groups(root)
        self.groups = [InstalledGroup(g, access.group_name(g), group_verdict(g, config), _layout(g)) for g in groups]
        if capture.capturing():  # nothing can be exchanged; all ranks capture, or they would not meet in their graphs
            for installed in (g for g in self.groups if g.verdict.ok):
                installed.verdict = fallback("TIDE-F018")
        else:
            self._agree()
        try:
            for ranks, members in self._process_groups():
                try:
                    self._install(ranks, members)
                except TideArenaError as e:  # raised on every rank alike
                    for installed in members:
                        installed.verdict = fallback(e.code, e)
            self._decide()
        except BaseException:
            self.close()
            raise
        for installed in self.groups:
            if installed.binding is None and installed.verdict.code not in ("TIDE-F015", "TIDE-F011"):
                installed.binding = GroupBinding()
                measure(installed.group, installed.binding)
        self._meter_gpus()

    def _meter_gpus(self) -> None:
        bindings = [g.binding for g in self.groups if g.binding is not None and g.group.device.type == "cuda"]
        if bindings:
            self.meter = ExposedMeter(len(bindings))
            for binding in bindings:
                binding.meter = self.meter

    def close(self) -> None:
        """Put stock FSDP2 back and release the arenas."""
        self._restore(self.groups)
        self.plans.clear()
        with contextlib.ExitStack() as closing:  # all of them, whatever one of them raises
            for engine in reversed(self.engines):
                closing.callback(engine.close)
            self.engines.clear()

    def _restore(self, groups: list[InstalledGroup]) -> None:
        for installed in groups:
            if installed.binding is not None:
                restore(installed.group)
                installed.binding = None

    def _agree(self) -> None:
        described = [{"name": g.name, "parameters": _described(g.group)} for g in self.groups]
        codes = [g.verdict.code for g in self.groups]
        ranks = access.mesh_groups(g.group.mesh_info.mesh for g in self.groups)
        others = agree_on_groups(ranks, described, codes, self.config.timeout_s)
        for installed, verdict in zip(self.groups, others, strict=True):
            installed.verdict = verdict or installed.verdict

    def _process_groups(self) -> list[tuple[dist.ProcessGroup, list[InstalledGroup]]]:
        """Eligible groups by the process group they are sharded over, in an order that all ranks share."""
        out: dict[int, tuple[dist.ProcessGroup, list[InstalledGroup]]] = {}
        for installed in self.groups:
            if installed.verdict.ok:
                ranks = installed.group.mesh_info.shard_process_group
                out.setdefault(id(ranks), (ranks, []))[1].append(installed)
        return list(out.values())

    def _install(self, ranks: dist.ProcessGroup, members: list[InstalledGroup]) -> None:
        """Connect ``members`` with the knobs that suit the machine, and keep those for which TIDE is not slower."""
        if self.config.plan != "auto":
            self._connect(ranks, members, None, "built in")
            return
        calibration = Calibration(ranks, members[0].group.device, self.config)
        rates, source = calibration.rates()
        if rates is None:
            source = "built in"
        knobs = self._connect(ranks, members, rates, source)
        kept = self._choose(calibration.groups(members, knobs), members)
        if len(kept) == len(members):
            return
        engine = self.engines.pop()
        self.plans.pop()
        self._restore(members)
        engine.close()
        if kept:
            self._connect(ranks, kept, rates, source)

    def _connect(
        self, ranks: dist.ProcessGroup, members: list[InstalledGroup], rates: Rates | None, source: str
    ) -> Knobs:
        """Move ``members`` into shared memory, on all of ``ranks`` or, with a TideArenaError on each, on none."""
        what = "moving the parameters into shared memory"
        exchange = process_group_exchange(ranks, self.config.timeout_s, what)
        engine, knobs, error = None, None, None
        try:
            engine, knobs = connect(ranks, members, self.config, rates)
        except TideError:
            raise
        except OSError as e:  # this rank's own: too little address space, too many open files
            error = f"{type(e).__name__}: {e}"
        try:
            agree(exchange, ranks.rank(), error, what, code="TIDE-F021")
            assert engine is not None
            assert knobs is not None
        except BaseException:
            self._restore(members)
            if engine is not None:
                engine.close()
            raise
        self.engines.append(engine)
        taken = rates or built_in(members[0].group.device.type)
        self.plans.append(
            PlanReport(
                ranks=ranks.size(),
                groups=len(members),
                knobs=knobs.to_dict(),
                stated=list(self.config.stated_knobs()),
                source=source,
                rates=taken.to_dict(),
                words=words(taken),
            )
        )
        return knobs

    def _choose(
        self, calibrated: Sequence[Calibrated | None], members: Sequence[InstalledGroup]
    ) -> list[InstalledGroup]:
        """The groups for which TIDE is not slower, on all ranks alike; the others get their verdict."""
        for installed, times in zip(members, calibrated, strict=True):
            installed.calibrated = times
        ours = [g.calibrated is None or g.calibrated.ours for g in members]
        for group in access.mesh_groups(g.group.mesh_info.mesh for g in members):
            exchange = process_group_exchange(group, self.config.timeout_s, "the choice of collectives")
            ours = [all(choices) for choices in zip(*exchange_json(exchange, ours), strict=True)]
        for installed, own in zip(members, ours, strict=True):
            if not own:
                why = installed.calibrated.words() if installed.calibrated else "in another replica"
                installed.verdict = fallback("TIDE-F026", why)
        return [g for g in members if g.verdict.ok]

    def _decide(self) -> None:
        """Warn once about options without effect and about fallbacks, or raise for fallbacks under ``strict``."""
        devices = {g.group.device.type for g in self.groups}
        idle = options_without_effect(*devices)
        unused = [name for name in self.config.changed() if name in idle]
        if isinstance(self.config.plan, PinnedPlan):
            unused += [
                f"plan.{k}" for k in KNOBS if f"reduce_scatter.{k}" in idle and getattr(self.config.plan, k) != "auto"
            ]
        if unused and dist.get_rank() == 0:
            _log.warning("TIDE: these options have no effect on %s ranks: %s", "/".join(devices), ", ".join(unused))
        # What the user asked for (plan: stock), or plan: auto has chosen, is no fallback.
        stock = [g for g in self.groups if g.verdict.code not in (OK, "TIDE-F022", "TIDE-F026")]
        if not stock:
            return
        words = "; ".join(f"{g.name}: {g.verdict}" for g in stock[:8])
        more = f" (and {len(stock) - 8} groups more)" if len(stock) > 8 else ""
        if self.config.strict:
            raise TideFallbackError(
                f"TIDE (strict): {len(stock)} of {len(self.groups)} groups fall back. {words}{more}"
            )
        if dist.get_rank() == 0:
            _log.warning("TIDE: %d of %d groups use stock collectives. %s%s", len(stock), len(self.groups), words, more)


def _check_materialised(root: FSDPModule) -> None:
    meta = [n for n, p in root.named_parameters() if p.is_meta]  # type: ignore[attr-defined]
    if meta:
        raise TideError(
            f"TIDE: {len(meta)} parameters are on the meta device ({', '.join(meta[:3])}...). Materialise the model "
            f"(to_empty and initialise, or load a checkpoint) before its first forward."
        )


def _layout(group: Any) -> GroupLayout:
    shapes = (ParamShape.of(p._orig_size, access.unsharded_dtype(p).itemsize) for p in group.fsdp_params)
    sharded = hasattr(group.mesh_info, "shard_process_group")
    return GroupLayout(tuple(shapes), group.mesh_info.shard_process_group.size() if sharded else 1)


def _described(group: Any) -> dict[str, Any]:
    """Name, size and dtypes of each parameter, for comparison between ranks."""
    return {
        str(p._param_fqn): [
            list(p._orig_size),
            str(p.orig_dtype),
            str(access.unsharded_dtype(p)),
            p.sharded_param.requires_grad,
        ]
        for p in group.fsdp_params
    }
