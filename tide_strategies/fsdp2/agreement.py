"""What all ranks must agree on, and the words for it when they do not.

Each rank states its options (when TIDE is applied) and its parameter groups with their verdicts (when it is
installed), over the model's own process groups. Differences in options or geometry are errors on every rank; a verdict
that differs becomes a fallback on every rank.

What a rank states grows with the model, and it hears from every rank. So ranks first compare digests; only if these
differ is everything said, as JSON, to find out in what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from tide_strategies.detect import OK, Verdict, fallback
from tide_strategies.errors import TideMismatchError
from tide_strategies.runtime.exchange import Exchange, exchange_json, process_group_exchange


def agree_on_options(groups: Iterable[dist.ProcessGroup], options: Mapping[str, Any], timeout_s: float) -> None:
    """Check that every rank has the same options.

    Raises:
        TideMismatchError: on every rank, naming two ranks, the option and both values.
    """
    for group in groups:
        exchange = process_group_exchange(group, timeout_s, "the agreement on TIDE's options")
        if not _alike(group, exchange, dict(options), "its options"):
            _same(group, exchange_json(exchange, dict(options)), "option")


def agree_on_groups(
    groups: Iterable[dist.ProcessGroup], described: Sequence[dict[str, Any]], codes: Sequence[str], timeout_s: float
) -> list[Verdict | None]:
    """Check that every rank has the same parameter groups; returns a verdict where another rank falls back.

    Args:
        groups: process groups that together connect all ranks of the model.
        described: name and geometry of each parameter group here.
        codes: verdict code of each parameter group here.
        timeout_s: bound of every exchange.

    Raises:
        TideMismatchError: on every rank, naming two ranks and what differs.
    """
    current = list(codes)
    out: list[Verdict | None] = [None] * len(codes)
    for group in groups:
        exchange = process_group_exchange(group, timeout_s, "the agreement on the model's parameter groups")
        own = {"groups": list(described), "codes": current}
        if _alike(group, exchange, own, "its parameter groups"):
            continue
        stated = exchange_json(exchange, own)
        ranks = dist.get_process_group_ranks(group)
        for rank, theirs in zip(ranks, stated, strict=True):
            _check_form(rank, theirs)
        _same(group, [{f"group {i}": g for i, g in enumerate(s["groups"])} for s in stated], "parameter")
        for i in range(len(current)):
            other = next(((r, s["codes"][i]) for r, s in zip(ranks, stated, strict=True) if s["codes"][i] != OK), None)
            if other is not None and current[i] == OK:
                verdict = fallback("TIDE-F025", f"rank {other[0]} has {other[1]}")
                out[i], current[i] = verdict, verdict.code  # the code is passed on along the next mesh dimension
    return out


def _alike(group: dist.ProcessGroup, exchange: Exchange, own: Any, what: str) -> bool:
    """Whether all ranks state the same, by its digest."""
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    told = exchange_json(exchange, digest)
    for rank, theirs in zip(dist.get_process_group_ranks(group), told, strict=True):
        if not isinstance(theirs, str) or len(theirs) != len(digest):
            raise TideMismatchError(
                f"TIDE: rank {rank} states {what} in a form that is not known here: {_short(theirs)}. "
                f"Every rank must run the same version of TIDE."
            )
    return all(theirs == digest for theirs in told)


def _check_form(rank: int, stated: Any) -> None:
    groups, codes = (stated.get("groups"), stated.get("codes")) if isinstance(stated, dict) else (None, None)
    if not isinstance(groups, list) or not isinstance(codes, list) or len(groups) != len(codes):
        raise TideMismatchError(
            f"TIDE: rank {rank} states its parameter groups in a form that is not known here: {_short(stated)}. "
            f"Every rank must run the same version of TIDE."
        )


def _same(group: dist.ProcessGroup, stated: Sequence[Mapping[str, Any]], what: str) -> None:
    ranks = dist.get_process_group_ranks(group)
    for i, theirs in enumerate(stated):
        difference = _first_difference(stated[0], theirs)
        if difference is not None:
            name, first, other = difference
            raise TideMismatchError(
                f"TIDE: ranks disagree on {what} {name!r}: rank {ranks[0]} has {_short(first)}, "
                f"rank {ranks[i]} has {_short(other)}. Give every rank the same model and the same options."
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _first_difference(a: Any, b: Any, path: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(k for k in b if k not in a)]:
            found = _first_difference(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    return (path, a, b) if a != b else None
