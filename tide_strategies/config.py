"""Typed options of TIDE: one tree for every door (plain PyTorch, Lightning, Accelerate, Hydra).

Build it directly, or from any mapping (YAML, JSON, an OmegaConf node) with :meth:`TideConfig.from_any`.
Every value is checked where it enters: an unknown key, a wrong type or a value outside its range raises
:class:`~tide_strategies.errors.TideConfigError`, which names the option, the value given, what is allowed and,
for a misspelt key, the nearest right name.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Literal, TypeVar

from tide_strategies.errors import TideConfigError

Auto = Literal["auto"]
T = TypeVar("T")

TOPOLOGY_ENV, PLAN_ENV = "TIDE_TOPOLOGY", "TIDE_PLAN"

#: Bounds of ``chunk_bytes``: a wait per chunk costs more than moving so little; staging holds two chunks a peer.
LEAST_CHUNK, MOST_CHUNK = 4096, 1 << 30
#: Upper bounds of the other knobs, which no machine has a use for.
_MOST = {"sum_ctas": 1024, "landing_ctas": 1024, "round_width": 1024, "passes": 64}
#: Options that tune a reduce-scatter and change no bit of its result.
KNOBS = ("chunk_bytes", *_MOST)

#: Slots of a ring at most: each has a counter on every rank, and no model has as many groups.
MOST_SLOTS = 4096
#: Sections within sections, at most: more is no configuration, or one that holds itself.
_MOST_DEPTH = 32
_TOO_DEEP = "an option is a section and a name, as in all_gather.slots"

#: About three years: what no clock behind a wait overflows at.
MAX_TIMEOUT_S = 1e8


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyConfig:
    """A topology stated by hand: ``nodes`` x ``gpus_per_node`` ranks, node-major (paper, Table 2)."""

    nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        _check_fields(self, "topology")
        _at_least(self.nodes, 1, "topology.nodes")
        _at_least(self.gpus_per_node, 1, "topology.gpus_per_node")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherConfig:
    """Options of the all-gather (paper, section 3).

    Args:
        multicast: use NVSwitch multicast where the hardware has it and nobody switched it off.
        slots: landing slots of the ring that unsharded parameters rotate through, 1 to 4096. More are
            added when the program keeps more groups unsharded at once.
        memory_budget: bytes for that ring, instead of ``slots``: it begins with as many slots as fit, at most one for
            each group.
        cache: where a slot that still holds current values replaces an all-gather.
    """

    multicast: Auto | bool = "auto"
    slots: int = 2
    memory_budget: int | None = None
    cache: Literal["off", "turnaround", "microbatch"] = "turnaround"

    def __post_init__(self) -> None:
        _check_fields(self, "all_gather")
        _at_least(self.slots, 1, "all_gather.slots")
        if self.slots > MOST_SLOTS:
            raise TideConfigError(f"TIDE option 'all_gather.slots' must be at most {MOST_SLOTS}; got {self.slots!r}")
        if self.memory_budget is not None:
            _at_least(self.memory_budget, 1, "all_gather.memory_budget")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatterConfig:
    """Options of the reduce-scatter (paper, sections 4 and 5). None of them changes a bit of the result.

    Args:
        mode: where gradients rest while they are read (section 5.3).
        sum_ctas: thread blocks of the node-local sum, or "auto".
        landing_ctas: thread blocks of the landing, or "auto".
        round_width: rail transfers in flight per round (k), or "auto".
        chunk_bytes: bytes of one contribution staged at a time, or "auto".
        passes: sub-slice passes per call, or "auto".
    """

    mode: Literal["in_place", "slot_reuse"] = "in_place"
    sum_ctas: Auto | int = "auto"
    landing_ctas: Auto | int = "auto"
    round_width: Auto | int = "auto"
    chunk_bytes: Auto | int = "auto"
    passes: Auto | int = "auto"

    def __post_init__(self) -> None:
        _check_fields(self, "reduce_scatter")
        _check_knobs(self, "reduce_scatter")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationConfig:
    """Options of the first-step calibration: its cache file (or "auto", "off") and its time budget in seconds."""

    cache: str = "auto"
    budget_s: float = 2.0

    def __post_init__(self) -> None:
        _check_fields(self, "calibration")
        _above_zero(self.budget_s, "calibration.budget_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """Switches for finding faults.

    Args:
        poison_slots: make vacated parameters read as NaN, so that a use after reshard is seen.
        trace: folder into which each rank writes when its calls began and ended, for ``tide timeline --measured``;
            empty takes the environment variable ``TIDE_TRACE``.
        autopsy: folder into which each rank writes what it awaited when it stops, for ``tide autopsy``; empty takes the
            environment variable ``TIDE_AUTOPSY``.
    """

    poison_slots: bool = False
    trace: str = ""
    autopsy: str = ""

    def __post_init__(self) -> None:
        _check_fields(self, "debug")


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedPlan:
    """A plan made by hand: which groups use which path, and with which knobs. Nothing is measured.

    Args:
        default: path of the groups that nothing else names.
        tide: names of groups (module names as in the report, ``*`` matches any text) that use TIDE.
        stock: names of groups that keep stock collectives; they win over ``tide``.
        sum_ctas, landing_ctas, round_width, chunk_bytes, passes: as of :class:`ReduceScatterConfig`; "auto" takes what
            is stated there, or what the planner makes of the rates that it has for this kind of device.
    """

    default: Literal["tide", "stock"] = "tide"
    tide: tuple[str, ...] = ()
    stock: tuple[str, ...] = ()
    sum_ctas: Auto | int = "auto"
    landing_ctas: Auto | int = "auto"
    round_width: Auto | int = "auto"
    chunk_bytes: Auto | int = "auto"
    passes: Auto | int = "auto"

    def __post_init__(self) -> None:
        _check_fields(self, "plan")
        _check_knobs(self, "plan")

    def path(self, name: str) -> str:
        """The path of the group with this name."""
        for path in ("stock", "tide"):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in getattr(self, path)):
                return path
        return self.default


@dataclass(frozen=True, kw_only=True, slots=True)
class TideConfig:
    """All options of TIDE.

    Args:
        enabled: False leaves stock FSDP2 untouched.
        strict: True turns every fallback to stock collectives into an error.
        plan: "auto" times both paths before the first step and uses TIDE for every eligible group where it is not
            slower; "tide" uses it for all of them; "stock" keeps stock collectives and only measures them; a mapping
            pins the choice by group name. The environment variable ``TIDE_PLAN`` overrides "auto".
        topology: "auto", or nodes and GPUs per node by hand (a mapping, or text such as "2x4"). The
            environment variable ``TIDE_TOPOLOGY`` overrides "auto".
        timeout_s: seconds that any wait for a peer may take before the job stops with an error, at most 1e8.
        rail: transport between nodes.
    """

    enabled: bool = True
    strict: bool = False
    plan: Literal["auto", "tide", "stock"] | PinnedPlan = "auto"
    topology: Auto | TopologyConfig = "auto"
    timeout_s: float = 300.0
    all_gather: AllGatherConfig = field(default_factory=AllGatherConfig)
    reduce_scatter: ReduceScatterConfig = field(default_factory=ReduceScatterConfig)
    rail: Literal["auto", "nccl_rma", "p2p", "local"] = "auto"
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        _check_fields(self, "")
        _above_zero(self.timeout_s, "timeout_s", MAX_TIMEOUT_S)
        for name in KNOBS:
            stated, pinned = getattr(self.reduce_scatter, name), getattr(self.plan, name, "auto")
            if "auto" not in (stated, pinned) and stated != pinned:
                raise TideConfigError(
                    f"TIDE options 'reduce_scatter.{name}' and 'plan.{name}' are {stated} and {pinned}: state one"
                )

    def stated_knobs(self) -> dict[str, int]:
        """The knobs that are no "auto", from the pinned plan or the options of the reduce-scatter."""
        places = (self.reduce_scatter, self.plan) if isinstance(self.plan, PinnedPlan) else (self.reduce_scatter,)
        return {n: v for place in places for n in KNOBS if type(v := getattr(place, n)) is int}

    @classmethod
    def from_any(cls, value: TideConfig | Mapping[str, Any] | None = None) -> TideConfig:
        """Build a config from nothing (defaults), a ``TideConfig``, or any mapping, nested or dotted.

        Raises:
            TideConfigError: naming the option, the value, and what is allowed.
        """
        if value is None:
            value = {}
        if not isinstance(value, TideConfig):
            value = _plain(value)
        if isinstance(value, Mapping):
            if isinstance(value.get("tide"), Mapping):
                raise TideConfigError(
                    "this is not TIDE's options, but a configuration that has them as its section 'tide'; give that "
                    "section (config.tide)"
                )
            value = _build(cls, _nest(value), "")
        if not isinstance(value, TideConfig):
            hint = (
                ". Read a file first: yaml.safe_load, OmegaConf.load" if isinstance(value, (str, os.PathLike)) else ""
            )
            raise TideConfigError(
                f"TIDE options must be a mapping or a TideConfig, not {type(value).__name__}: {value!r}{hint}"
            )
        plan = os.environ.get(PLAN_ENV, "auto") or "auto"
        if value.plan == "auto" and plan != "auto":
            try:
                value = replace(value, plan=plan)  # type: ignore[arg-type]
            except TideConfigError as e:
                raise TideConfigError(f"environment variable {PLAN_ENV}: {e}") from None
        stated = os.environ.get(TOPOLOGY_ENV, "auto") or "auto"
        if value.topology != "auto" or stated == "auto":
            return value
        try:
            return replace(value, topology=parse_topology(stated))
        except TideConfigError as e:
            raise TideConfigError(f"environment variable {TOPOLOGY_ENV}: {e}") from None

    def to_dict(self) -> dict[str, Any]:
        """The options as plain nested dictionaries, which :meth:`from_any` reads back to an equal config."""
        return asdict(self)

    def changed(self) -> list[str]:
        """Dotted names of the options that differ from their defaults."""
        return [name for name, value in _flat(self.to_dict()).items() if value != _DEFAULTS.get(name, value)]


def parse_topology(text: str) -> TopologyConfig:
    """Read ``"NODESxGPUS"``, for example ``"2x4"``.

    Raises:
        TideConfigError: if the text has another form or a number below 1.
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.strip().isdecimal() and len(p.strip()) < 10 for p in parts):
        raise TideConfigError(
            f"topology must be 'auto', a mapping with nodes and gpus_per_node, or text such as '2x4'; got {text!r}"
        )
    return TopologyConfig(nodes=int(parts[0]), gpus_per_node=int(parts[1]))


def _plain(value: Any, depth: int = 0) -> Any:
    """Turn any mapping type (an OmegaConf node, say) into plain dictionaries, and enumeration members into names."""
    if depth > _MOST_DEPTH:
        raise TideConfigError(f"TIDE options are nested deeper than {_MOST_DEPTH} sections: {_TOO_DEEP}")
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {k: _plain(value[k], depth + 1) for k in value}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(_plain(v, depth + 1) for v in value)
    return value.name if isinstance(value, Enum) else value


def _nest(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Accept ``{"all_gather.slots": 3}`` as well as ``{"all_gather": {"slots": 3}}``."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if not isinstance(key, str):
            raise TideConfigError(f"TIDE option names are text; got {key!r}")
        if key.count(".") > _MOST_DEPTH:
            raise TideConfigError(
                f"TIDE option {key[:60] + '...'!r} names more than {_MOST_DEPTH} sections: {_TOO_DEEP}"
            )
        head, _, rest = key.partition(".")
        if rest:
            key, value = head, _nest({rest: value})
        if key not in out:
            out[key] = dict(value) if isinstance(value, dict) else value
        elif isinstance(value, dict) and isinstance(out[key], dict):
            out[key].update(value)
        else:
            raise TideConfigError(f"TIDE option {key!r} is given both as a value and as a section")
    return out


def _build(cls: type[T], data: Mapping[str, Any], path: str) -> T:
    """Build one section from a mapping, refusing names it does not have."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{path}{key}"
        if key not in known:
            close = [path + name for name in difflib.get_close_matches(str(key), known, n=1)]
            close = close or [name for name in _DEFAULTS if name.endswith(f".{key}")]  # of another section
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
            raise TideConfigError(f"unknown TIDE option {where!r}{hint} Known here: {', '.join(known)}.")
        if key == "cache" and value is False:
            value = "off"  # how YAML 1.1 reads a bare off
        if key == "topology" and isinstance(value, str) and value != "auto":
            value = parse_topology(value)
        section: Any = next((h for h in _members(hints[key]) if is_dataclass(h)), None)
        if section is not None and isinstance(value, Mapping):
            value = _build(section, value, f"{where}.")
        values[key] = value
    missing = [f.name for f in fields(cls) if f.name not in values and _required(f)]  # type: ignore[arg-type]
    if missing:
        raise TideConfigError(f"TIDE option {path.removesuffix('.')!r} needs {', '.join(missing)} as well")
    return cls(**values)


def _required(f: Any) -> bool:
    from dataclasses import MISSING

    return f.default is MISSING and f.default_factory is MISSING


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _check_fields(obj: Any, section: str) -> None:
    """Check every field of a section against its annotation (strict: no truthiness, no text for numbers)."""
    hints = typing.get_type_hints(type(obj))
    for f in fields(obj):
        value, members = getattr(obj, f.name), _members(hints[f.name])
        if not any(_accepts(value, m) for m in members):
            name = f"{section}.{f.name}" if section else f.name
            allowed = " or ".join(_describe(m) for m in members)
            choices = [a for m in members if typing.get_origin(m) is Literal for a in typing.get_args(m)]
            close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
            hint = f"; did you mean {close[0]!r}?" if close else ""
            got = f"{value!r} ({type(value).__name__}){hint}"
            raise TideConfigError(f"TIDE option {name!r} must be {allowed}; got {got}")


def _accepts(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return type(value) is str and value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return type(value) is tuple and all(type(v) is str for v in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "a list of texts"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(hint) or f"a section with {', '.join(f.name for f in fields(hint))}"


def _at_least(value: Any, low: int, name: str) -> None:
    if value != "auto" and value < low:
        raise TideConfigError(f"TIDE option {name!r} must be at least {low}; got {value!r}")


def _check_knobs(section: Any, name: str) -> None:
    for knob in KNOBS:
        value = getattr(section, knob)
        low, high = (LEAST_CHUNK, MOST_CHUNK) if knob == "chunk_bytes" else (1, _MOST[knob])
        _at_least(value, low, f"{name}.{knob}")
        if value != "auto" and value > high:
            raise TideConfigError(f"TIDE option '{name}.{knob}' must be at most {high}; got {value!r}")


def _above_zero(value: float, name: str, most: float = sys.float_info.max) -> None:
    if not 0 < value <= most:
        raise TideConfigError(f"TIDE option {name!r} must be above zero and at most {most:g}; got {value!r}")


def _flat(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """``{"all_gather.slots": 2, ...}`` from nested dictionaries."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        out.update(_flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value})
    return out


_DEFAULTS = _flat(TideConfig().to_dict())
