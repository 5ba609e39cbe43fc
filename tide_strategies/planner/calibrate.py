"""Calibration: what is known of a machine and of each group's two paths, and the cache that keeps it.

Measuring is ``fsdp2/calibration.py``'s and ``fsdp2/probing.py``'s. The cache is one JSON file per fingerprint of
everything that times depend on, in the user's cache folder, mode 0600. It is parsed as data, believed only if it is the
user's own and holds exactly what is expected, and otherwise measured anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tide_strategies.layout import GroupLayout
from tide_strategies.planner.rates import Rates

FORMAT = 3
#: A larger file is none of ours.
_MAX_BYTES = 1 << 20
#: No collective takes longer than this; what says so is not believed.
_MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one all-gather and one reduce-scatter by themselves, of the slowest rank."""

    all_gather_s: float
    reduce_scatter_s: float

    def per_step(self, gathers: int) -> float:
        """Seconds in a step that gathers ``gathers`` times and reduces once."""
        return gathers * self.all_gather_s + self.reduce_scatter_s


@dataclass(frozen=True, slots=True)
class Measured:
    """Both paths for one geometry.

    Args:
        tide: our times.
        stock: those of the stock path.
        shard_bytes: what each rank contributes to the all-gather.
        items: of that shard.
    """

    tide: Timing
    stock: Timing
    shard_bytes: int
    items: int

    def gain(self, gathers: int) -> float:
        """Seconds a step that TIDE saves; negative if it costs."""
        return self.stock.per_step(gathers) - self.tide.per_step(gathers)


#: Geometry key -> what was measured.
Table = dict[str, Measured]


@dataclass(frozen=True, slots=True)
class Known:
    """What has been measured under some facts: the machine's rates (None: not yet), and groups."""

    rates: Rates | None = None
    groups: Table = field(default_factory=dict)


def geometry(layout: GroupLayout, *details: object) -> str:
    """A short key for a group's sizes among its ranks and whatever else its times depend on (dtypes)."""
    shapes = [[s.rows, s.row_items, s.itemsize] for s in layout.params]
    text = json.dumps([layout.ranks, shapes, [str(d) for d in details]])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def estimate(table: Mapping[str, Measured], shard_bytes: int) -> Measured | None:
    """Times of a size that was not measured: on a line through those that were, or in proportion to the only one."""
    sizes = {m.shard_bytes for m in table.values()}
    if len(sizes) < 2:
        only = next(iter(table.values()), None)
        if only is None:
            return None
        factor = max(shard_bytes, 1) / max(only.shard_bytes, 1)
        return Measured(_scaled(only.tide, factor), _scaled(only.stock, factor), shard_bytes, 0)

    def at(which: str, what: str) -> float:
        samples = [(float(m.shard_bytes), getattr(getattr(m, which), what)) for m in table.values()]
        call_s, rate = line(samples)
        return call_s + shard_bytes / rate

    tide, stock = (Timing(at(w, "all_gather_s"), at(w, "reduce_scatter_s")) for w in ("tide", "stock"))
    return Measured(tide, stock, shard_bytes, 0)


def _scaled(timing: Timing, factor: float) -> Timing:
    return Timing(timing.all_gather_s * factor, timing.reduce_scatter_s * factor)


def line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds of a call that moves nothing, and bytes per second: least squares over (bytes, seconds), weighted by 1/t.

    Raises:
        ValueError: fewer than two different sizes.
    """
    if len({b for b, _ in samples}) < 2:
        raise ValueError("a line needs two different sizes")
    weights = [1 / max(t, 1e-9) ** 2 for _, t in samples]
    total = sum(weights)
    x = sum(w * b for w, (b, _) in zip(weights, samples, strict=True)) / total
    y = sum(w * t for w, (_, t) in zip(weights, samples, strict=True)) / total
    covariance = sum(w * (b - x) * (t - y) for w, (b, t) in zip(weights, samples, strict=True))
    variance = sum(w * (b - x) ** 2 for w, (b, _) in zip(weights, samples, strict=True))
    slope = max(covariance / variance, 1e-15)
    return max(0.0, y - slope * x), 1 / slope


def folder(option: str) -> Path | None:
    """Where calibrations are kept: ``calibration.cache``, "auto" for the user's cache folder; None for nowhere.

    Nowhere is for "off", and for a user who has no home.
    """
    if option == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if option != "auto":
            return Path(option).expanduser()
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "tide_strategies" / "calibration"


def fingerprint(facts: Mapping[str, str]) -> str:
    """A name for these facts."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:32]


def load(where: Path, facts: Mapping[str, str]) -> tuple[Known, str]:
    """What is known under exactly these facts, and why nothing is, in words (empty if there is just no file)."""
    file = where / f"{fingerprint(facts)}.json"
    content, problem = _read(file)
    if content is None:
        return Known(), problem
    try:
        return parse(content, facts), ""
    except (ValueError, RecursionError) as e:
        return Known(), f"{file}: {e}"


def newest(where: Path, device: str) -> Rates:
    """The rates of the latest calibration of ranks on ``device`` ("cpu" or "cuda").

    Raises:
        ValueError: there is none that can be read; in words.
    """
    problems = ""
    files = [f for f in where.glob("*.json") if f.is_file()] if where.is_dir() else []
    for file in sorted(files, key=lambda f: -f.stat().st_mtime):
        content, problems = _read(file)
        try:
            facts = json.loads(content or b"").get("facts")
            if isinstance(facts, dict) and facts.get("device") == device and file.stem == fingerprint(facts):
                rates = parse(content or b"", facts).rates
                if rates is not None:
                    return rates
        except (ValueError, AttributeError, RecursionError) as e:
            problems = f"{file}: {e}"
    raise ValueError(f"no rates of {device} ranks in {where}{f' ({problems})' if problems else ''}")


def _read(file: Path) -> tuple[bytes | None, str]:
    """A file's content if it is the user's own, else None and why, in words."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, ""
    except OSError as e:
        return None, f"{file}: {e.strerror}"
    with os.fdopen(fd, "rb") as opened:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return None, f"{file} is not a file that this user alone can write"
        return opened.read(_MAX_BYTES + 1), ""


def store(where: Path, facts: Mapping[str, str], known: Known) -> str:
    """Write what is known, whole or not at all; returns what went wrong in words, or nothing."""
    data = {"format": FORMAT, "facts": dict(facts), **plain(known)}
    temporary = ""
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=where, prefix=".new-")  # mode 0600
        with os.fdopen(fd, "w") as file:
            json.dump(data, file)
        os.replace(temporary, where / f"{fingerprint(facts)}.json")
    except OSError as e:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return f"{where}: {e.strerror}"
    return ""


def plain(known: Known) -> dict[str, Any]:
    """What is known as plain values; :func:`from_plain` reads it back."""
    rates = None if known.rates is None else known.rates.to_dict()
    return {"rates": rates, "groups": {key: asdict(m) for key, m in known.groups.items()}}


def parse(content: bytes, facts: Mapping[str, str]) -> Known:
    """Read what :func:`store` wrote.

    Raises:
        ValueError: it is anything else, or was measured under other facts.
    """
    if len(content) > _MAX_BYTES:
        raise ValueError("too large")
    data = json.loads(content)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("not a calibration of this version")
    if data.get("facts") != dict(facts):
        raise ValueError("measured on something else")
    return from_plain(data)


def from_plain(data: Mapping[str, Any]) -> Known:
    """Read what :func:`plain` gave; other entries are let be.

    Raises:
        ValueError: it has another form, or numbers that cannot be.
    """
    rates, groups = data.get("rates"), data.get("groups")
    if not isinstance(groups, dict):
        raise ValueError("no groups")
    return Known(
        None if rates is None else Rates.from_dict(rates), {str(key): measured(entry) for key, entry in groups.items()}
    )


def measured(entry: Any) -> Measured:
    """One entry of a table from plain values.

    Raises:
        ValueError: it has another form, or numbers that cannot be.
    """
    if not isinstance(entry, dict) or entry.keys() != {"tide", "stock", "shard_bytes", "items"}:
        raise ValueError(f"not a measurement: {str(entry)[:80]}")
    for key in ("shard_bytes", "items"):
        if type(entry[key]) is not int or not 0 <= entry[key] < 1 << 50:
            raise ValueError(f"{key} is {entry[key]!r}")
    return Measured(_timing(entry["tide"]), _timing(entry["stock"]), entry["shard_bytes"], entry["items"])


def _timing(entry: Any) -> Timing:
    if not isinstance(entry, dict) or entry.keys() != {"all_gather_s", "reduce_scatter_s"}:
        raise ValueError(f"not a timing: {str(entry)[:80]}")
    for value in entry.values():
        if type(value) not in (int, float) or not 0 <= value <= _MAX_SECONDS:
            raise ValueError(f"a time of {value!r} seconds")
    return Timing(float(entry["all_gather_s"]), float(entry["reduce_scatter_s"]))
