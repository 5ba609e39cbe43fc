"""TIDE's options for Hydra and OmegaConf, typed.

Any Hydra application finds the group ``tide`` (``hydra_plugins/tide_strategies_configs.py`` registers it)::

    defaults:
      - tide: h200

and overrides it, ``python app.py tide.reduce_scatter.mode=slot_reuse``. Without Hydra, merge into the schema::

    config = OmegaConf.merge(structured_config(), OmegaConf.load("options.yaml"), OmegaConf.from_cli())

Either way ``TideConfig.from_any(config)`` (or any door of TIDE that takes options) reads the result.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any, Union

from tide_strategies.config import TideConfig

GROUP = "tide"


@cache
def schema(section: type = TideConfig) -> type:
    """A dataclass with the fields, types and defaults of ``TideConfig`` (or a section of it) as OmegaConf knows types.

    Choices become enumerations, so OmegaConf itself refuses a wrong one. Its name, which OmegaConf gives when it
    refuses a wrong key, lists the right keys.
    """
    hints = typing.get_type_hints(section)
    made = make_dataclass(section.__name__, [_field(f, hints[f.name]) for f in fields(section)])
    made.__name__ = f"{section.__name__}, whose options are {', '.join(f.name for f in fields(section))}"
    return made


def structured_config() -> Any:
    """The schema with its defaults as an OmegaConf node, to merge files and command lines into."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema())


def register_configs() -> None:
    """Put the group ``tide`` into Hydra's ConfigStore: one typed, complete config for each file of ``configs/tide``."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    presets = {}
    for file in files("tide_strategies.configs.tide").iterdir():
        name, _, suffix = file.name.rpartition(".")
        if suffix == "yaml":
            config = OmegaConf.merge(structured_config(), OmegaConf.create(file.read_text()))
            presets[name] = OmegaConf.to_object(config)
    store = ConfigStore.instance()  # all of them are well, so that there is never a part of the group
    for name, node in presets.items():
        store.store(group=GROUP, name=name, node=node, provider="tide_strategies")


def _field(option: Field[Any], hint: Any) -> tuple[str, Any, Any]:
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(is_dataclass(m) for m in members):
        if len(members) > 1:
            return option.name, Any, field(default=option.default)  # topology: a word or a section
        return option.name, schema(hint), field(default_factory=schema(hint))
    assert option.default is not MISSING
    if len(members) == 1 and typing.get_origin(hint) is typing.Literal:
        choices: Any = Enum(option.name, {name: name for name in typing.get_args(hint)})  # type: ignore[misc]
        return option.name, choices, field(default=choices[option.default])
    plain = tuple(str if typing.get_origin(m) is typing.Literal else m for m in members)
    return option.name, Union[plain], field(default=option.default)  # noqa: UP007 (the members are not known here)
