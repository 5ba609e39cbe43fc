"""A Lightning callback that writes down what a training run did: losses, times, memory, and the final parameters.

It works with every strategy; what it says of collectives comes from ``strategy.tide_report()``.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from tide_strategies.report import TideReport

_SAMPLE_S = 0.02
# Totals over the timed steps, in the order in which ranks exchange them: those of all groups' collectives, and how
# long the training thread was ready to run but had no processor (other programs had it).
COLLECTIVE_TOTALS = ("calls", "seconds", "wait_seconds", "bytes")
TOTALS = (*COLLECTIVE_TOTALS, "processor_wait_seconds")


class StepRecorder(Callback):
    """Record a run in a JSON file, written by rank 0 when training ends.

    Args:
        out: the file; ``out`` + ".progress" gets one line per step ("step loss seconds") while the run goes on.
            ``None`` records nothing.
        warmup: first steps that count as start-up (allocation, installation, calibration) and not as step time.
        memory_steps: last steps, which are not timed either: memory is sampled during them.
    """

    def __init__(self, out: Path | None, warmup: int = 5, memory_steps: int = 3) -> None:
        self.out, self.warmup, self.memory_steps = out, warmup, memory_steps
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._began = time.perf_counter()
        self._step_began = 0.0
        self._totals: list[dict[str, float]] = []
        self._memory = _MemorySampler()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a run that is too short to have a timed step."""
        shortest = self.warmup + self.memory_steps + 1
        if self.out is not None and trainer.max_steps < shortest:
            raise ValueError(f"a recorded run needs at least {shortest} steps; got {trainer.max_steps}")
        if self.out is not None and trainer.is_global_zero:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._progress().write_text("")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of a step; begin the timed steps, and the steps that memory is sampled in."""
        if len(self.seconds) == self.warmup:
            self._totals.append(_totals(trainer))
        if len(self.seconds) == trainer.max_steps - self.memory_steps:
            self._totals.append(_totals(trainer))
            self._memory.start()
        self._step_began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Forward, backward and the optimizer step are over."""
        self.seconds.append(time.perf_counter() - self._step_began)
        self.losses.append(float(outputs["loss"].detach()))
        if self.out is not None and trainer.is_global_zero:
            with self._progress().open("a") as f:
                f.write(f"{len(self.losses)} {self.losses[-1]:.4f} {self.seconds[-1]:.4f}\n")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect every rank's numbers and write the file."""
        peak_pss, peak_rss = self._memory.stop()
        if self.out is None:
            return
        before, after = self._totals
        totals = [after[k] - before[k] for k in TOTALS]
        ranks = _gather([*totals, peak_pss, peak_rss, *self.seconds, *self.losses])
        digest = parameter_digest(pl_module)
        if not trainer.is_global_zero:
            return
        report = _report(trainer)
        val_loss = trainer.callback_metrics.get("val_loss")
        record = {
            "strategy": type(trainer.strategy).__name__,
            "world_size": trainer.world_size,
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in pl_module.parameters()),
            "parameter_sha256": digest,
            "val_loss": None if val_loss is None else float(val_loss),
            "warmup": self.warmup,
            "timed_steps": len(self.seconds) - self.warmup - self.memory_steps,
            "wall_seconds": time.perf_counter() - self._began,
            "ranks": [_rank_record(r, len(self.seconds)) for r in ranks],
            "report": None if report is None else report.to_dict(),
        }
        self.out.write_text(json.dumps(record, indent=1) + "\n")

    def _progress(self) -> Path:
        assert self.out is not None
        return progress_file(self.out)


def progress_file(out: Path) -> Path:
    """Where a run that records into ``out`` says how far it is."""
    return out.with_name(out.name + ".progress")


def parameter_digest(module: torch.nn.Module) -> str:
    """SHA-256 over names and bits of all parameters, whole and in order. Collective: every rank must call it."""
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(name.encode())
            # A copy: a storage that numpy has looked into cannot be freed by FSDP2 any more, and the root's
            # parameters are still whole (no DTensors) after a validation.
            digest.update(whole.detach().cpu().contiguous().clone().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _gather(numbers: list[float]) -> list[list[float]]:
    """The numbers of every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [numbers]
    parts: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, numbers)  # on whichever device the backend works
    return parts


def _rank_record(numbers: list[float], steps: int) -> dict[str, Any]:
    totals = dict(zip(TOTALS, numbers, strict=False))
    peak_pss, peak_rss, *series = numbers[len(TOTALS) :]
    return {
        "processor_wait_seconds": totals.pop("processor_wait_seconds"),
        "collectives": totals,
        "peak_pss_bytes": int(peak_pss),
        "peak_rss_bytes": int(peak_rss),
        "step_seconds": series[:steps],
        "losses": series[steps:],
    }


def _report(trainer: Trainer) -> TideReport | None:
    ask = getattr(trainer.strategy, "tide_report", None)
    return ask() if ask is not None else None


def _totals(trainer: Trainer) -> dict[str, float]:
    """All ``TOTALS`` so far; zeros for collectives under a strategy that does not tell."""
    report = _report(trainer)
    stats = [s for g in report.groups for s in (g.all_gather, g.reduce_scatter)] if report is not None else []
    totals = {k: float(sum(getattr(s, k) for s in stats)) for k in COLLECTIVE_TOTALS}
    return {**totals, "processor_wait_seconds": _processor_wait()}


def _processor_wait() -> float:
    """Seconds that this thread has waited for a processor since it began; 0.0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@dataclass
class _MemorySampler:
    """Peak of this process's proportional set size while it runs: a page shared by n processes counts 1/n in each."""

    peak_pss: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tide-demo-memory", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int, int]:
        """End sampling. Returns the peaks of PSS (while sampling) and of RSS (since the process began), in bytes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return self.peak_pss, _kibibytes(Path("/proc/self/status"), "VmHWM:")

    def _run(self) -> None:
        while True:
            self.peak_pss = max(self.peak_pss, _kibibytes(Path("/proc/self/smaps_rollup"), "Pss:"))
            if self._stop.wait(_SAMPLE_S):
                return


def _kibibytes(path: Path, key: str) -> int:
    """A field of a file under /proc in bytes; 0 where the kernel does not have it."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
