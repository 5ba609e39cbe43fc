"""What benchmarks show: a header that says where, a table that grows row by row, JSON, and a picture."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tide_strategies import __version__
from tide_strategies.cli.bench.ranks import Failure, Row

_ENVIRONMENT = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")


@dataclass(frozen=True)
class Column:
    """One column of a table: the key in a row, its heading, how a value is written, and the characters it needs."""

    key: str
    title: str
    form: str = ""
    room: int = 8

    @property
    def width(self) -> int:
        """Characters: room for the heading and for the values."""
        return max(len(self.title), self.room)

    def cell(self, row: Row) -> str:
        """The value in ``row``; "-" where there is none."""
        value = row.get(self.key)
        return "-" if value is None else format(value, self.form)


def heading(columns: Sequence[Column]) -> str:
    """The line above the rows."""
    return "  ".join([columns[0].title.ljust(columns[0].width), *(c.title.rjust(c.width) for c in columns[1:])])


def line(columns: Sequence[Column], row: Row) -> str:
    """One row; the first column stands left, the others right."""
    cells = [columns[0].cell(row).ljust(columns[0].width), *(c.cell(row).rjust(c.width) for c in columns[1:])]
    return "  ".join(cells)


def ratio(a: float | None, b: float | None) -> float | None:
    """``a / b``; None where one of them is missing or there is nothing to divide by."""
    return a / b if a is not None and b else None


def environment(device: str, ranks: int | Sequence[int]) -> dict[str, Any]:
    """What a result needs to be read: versions, machine, date."""
    import torch

    facts: dict[str, Any] = {
        "tide_strategies": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device,
        "ranks": ranks,
    }
    if device == "cuda":
        facts.update(_gpus(torch))
        facts["environment"] = {name: os.environ.get(name, "not set") for name in _ENVIRONMENT}
    else:
        facts["processor"] = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores usable"
    return facts


def _gpus(torch: Any) -> dict[str, Any]:
    """Cards and driver, without a CUDA context in this process."""
    from tide_strategies._native import cuda

    found = cuda.probe()
    cards = [str(cuda.device_info(i)["name"]) for i in range(int(found["devices"]))] if found["available"] else []
    out = {"gpus": cards, "cuda_driver": found.get("driver_version"), "cuda": torch.version.cuda}
    try:
        out["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as e:  # a header is no reason to stop
        out["nccl"] = f"not known ({type(e).__name__})"
    return out


def header(facts: dict[str, Any]) -> str:
    """The facts as a few lines."""
    return "\n".join(f"# {key}: {_words(value)}" for key, value in facts.items())


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(f"{value.count(v)} x {v}" if value.count(v) > 1 else str(v) for v in dict.fromkeys(value))
    return str(value)


def write_json(path: Path, facts: dict[str, Any], rows: Sequence[Row], failures: Sequence[Failure]) -> None:
    """Facts, rows and failures as one JSON object."""
    content = {"about": facts, "rows": list(rows), "failures": [asdict(f) for f in failures]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_picture(path: Path, title: str, draw: Callable[[Any, Sequence[Row]], None], rows: Sequence[Row]) -> bool:
    """Let ``draw`` fill axes and write them to ``path``. False, and no file, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    draw(axes, rows)
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def grouped_bars(
    axes: Any, labels: Sequence[str], series: Sequence[tuple[str, Sequence[float | None]]], ylabel: str
) -> None:
    """Bars side by side for each label; a missing value leaves a gap."""
    width = 0.8 / max(1, len(series))
    for i, (name, values) in enumerate(series):
        places = [x + (i - (len(series) - 1) / 2) * width for x in range(len(labels))]
        axes.bar(places, [float("nan") if v is None else v for v in values], width, label=name)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel(ylabel)
    if series:
        axes.legend(frameon=False, fontsize=8)
