"""Options of TIDE among a door's own keyword arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError

TIDE_OPTIONS = tuple(f.name for f in fields(TideConfig))


def combined(tide: TideConfig | Mapping[str, Any] | None, given: Mapping[str, Any]) -> TideConfig:
    """``tide=`` and TIDE options given as keyword arguments of their own, together.

    Raises:
        TideConfigError: an option is wrong, or given both ways.
    """
    if isinstance(tide, Mapping):
        twice = sorted(set(tide) & set(given))
        if twice:
            raise TideConfigError(f"{', '.join(twice)} given both inside tide= and as a keyword argument; give it once")
        return TideConfig.from_any({**tide, **given})
    return TideConfig.from_any({**TideConfig.from_any(tide).to_dict(), **given}) if given else TideConfig.from_any(tide)


def unknown_option(name: str, owner: str, own: Sequence[str], described: str) -> str:
    """Words for a keyword argument that ``owner`` does not have, with the nearest of those it has.

    Args:
        own: the names that it has beside TIDE's.
        described: those names for the reader.
    """
    close = difflib.get_close_matches(name, [*own, *TIDE_OPTIONS], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{owner} has no option {name!r}{hint} It takes {described}, and the TIDE options {', '.join(TIDE_OPTIONS)}."
