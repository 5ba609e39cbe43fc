"""The ``tide_config:`` section of an Accelerate configuration file.

The class that Accelerate reads its files with gets one more field. It is kept when a file is read and written again
(``accelerate config update``), shown by ``accelerate env``, and used by ``accelerate launch`` alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.options import TIDE_OPTIONS

SECTION = "tide_config"


class TideSection:
    """The section as written, and the options that it means.

    It is no mapping on purpose: Accelerate's launcher copies the items of every dictionary in a configuration over
    its own arguments of the same names (``debug``, for one).
    """

    def __init__(self, written: Any) -> None:
        if written is None:
            written = {}  # "tide_config:" with nothing below it: all defaults
        if not isinstance(written, Mapping):
            raise TideConfigError(
                f"{SECTION} must be a section of options, for example 'timeout_s: 60' indented below it; "
                f"got {written!r}"
            )
        self.written = dict(written)
        try:
            self.config = TideConfig.from_any(self.written)
        except TideConfigError as e:
            raise TideConfigError(f"{SECTION}: {e}") from None


def add_tide_section(config_args: ModuleType) -> None:
    """Give the section a field in ``ClusterConfig`` of ``accelerate.commands.config.config_args``."""
    host: Any = config_args.ClusterConfig
    if SECTION in host.__dataclass_fields__:
        return

    @dataclass
    class ClusterConfig(host):
        tide_config: Any = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.tide_config is not None:
                refuse_misplaced_options(self.fsdp_config, "fsdp_config", "Accelerate")
                # Accelerate's default is FSDP1; who asks for TIDE asks for FSDP2.
                self.fsdp_config.setdefault("fsdp_version", 2)

        @staticmethod
        def process_config(config_dict: dict[str, Any]) -> Any:
            _refuse_misspelt_section(config_dict, host.__dataclass_fields__)
            if SECTION in config_dict:
                config_dict[SECTION] = TideSection(config_dict[SECTION])
            return host.process_config(config_dict)

        def to_dict(self) -> Any:
            result = super().to_dict()
            if self.tide_config is not None:
                result[SECTION] = self.tide_config.written
            return result

    ClusterConfig.__module__, ClusterConfig.__qualname__ = host.__module__, host.__qualname__
    ClusterConfig.__doc__ = host.__doc__
    config_args.ClusterConfig = ClusterConfig  # type: ignore[attr-defined]


def _refuse_misspelt_section(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key in config:
        if key in known or key == SECTION:
            continue
        if key == "tide" or difflib.get_close_matches(key, [SECTION], cutoff=0.75):
            raise TideConfigError(f"unknown section {key!r} in the Accelerate file; did you mean {SECTION!r}?")


def refuse_misplaced_options(fsdp_config: Mapping[str, Any], where: str, reader: str) -> None:
    """Refuse options of TIDE among those of FSDP, whose reader passes over names that it does not know.

    Args:
        where: what holds them, for the reader of the message.
        reader: who would pass over them.

    Raises:
        TideConfigError: with each such name, and the nearest right one for a misspelt one.
    """
    misplaced = []
    for key in fsdp_config:
        # 0.8: farther than the names that FSDP itself has (limit_all_gathers is 0.74 from all_gather)
        name = str(key).removeprefix("fsdp_").partition(".")[0]
        close = difflib.get_close_matches(name, TIDE_OPTIONS, n=1, cutoff=0.8)
        if name in TIDE_OPTIONS or name.startswith("tide"):
            misplaced.append(str(key))
        elif close:
            misplaced.append(f"{key} (did you mean {close[0]!r}?)")
    if misplaced:
        raise TideConfigError(
            f"{where} holds {', '.join(misplaced)}, which {reader} would ignore. Options of TIDE go into the "
            f"section {SECTION}, at the top level of the Accelerate file."
        )
