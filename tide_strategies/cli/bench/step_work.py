"""What each rank does for ``tide bench step``: time the variants in turns, then measure each one's memory by itself."""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tide_strategies.cli.bench.model import block_batch
from tide_strategies.cli.bench.ranks import Place, Row, meet
from tide_strategies.cli.bench.step_trace import traced
from tide_strategies.cli.bench.timing import slowest_rank
from tide_strategies.cli.bench.variants import (
    SLOT_REUSE,
    ModelSize,
    NotHereError,
    Variant,
    build,
    dispose,
)
from tide_strategies.fsdp2.install import options_without_effect

GiB = 2**30
#: Behind the name of a variant whose option changes nothing here: its row repeats another's.
NO_EFFECT = " (no effect)"
_BLOCKS = 3
_WARM_UP = 2
_HOST_STEPS = 5
_MEMORY_STEPS = 3


class StepWork:
    """All variants of one model size on this rank. Every method is collective.

    Args:
        names: the variants to measure.
        trace: record where the time of steps goes, too (GPU).
    """

    def __init__(
        self,
        place: Place,
        *,
        width: int,
        hidden: int,
        depth: int,
        sequence: int,
        steps: int,
        optimizer: bool,
        options: dict[str, Any],
        names: Sequence[str],
        trace: bool = False,
    ) -> None:
        self.place, self.size, self._trace = place, ModelSize(width, hidden, depth), trace and place.on_gpu
        self._sequence, self._steps, self._optimizer, self._options = sequence, steps, optimizer, options
        self.names = list(names)
        self.notes: list[str] = []
        self.about: Row = {
            "ranks": place.ranks,
            "width": width,
            "hidden": hidden,
            "depth": depth,
            "block_parameters": self.size.block_parameters,
            "optimizer_timed": optimizer,
        }
        self._variants: dict[str, Variant] = {}
        for name in self.names:
            variant = self._build(name)
            if variant is not None:
                self._variants[name] = variant
        #: Names as the table shows them, where they differ.
        self.labels: dict[str, str] = {}
        if "reduce_scatter.mode" in options_without_effect(place.device.type):
            self.labels[SLOT_REUSE] = f"{SLOT_REUSE}{NO_EFFECT}"

    def times(self, tokens: int) -> dict[str, Row]:
        """``step_ms`` and ``host_ms`` of each variant that runs here; with a trace, the parts of its steps too."""
        x = self._batch(tokens)
        per_block = -(-self._steps // _BLOCKS)
        names = list(self._variants)
        times = torch.zeros(len(names), _BLOCKS * per_block, dtype=torch.float64)
        for block in range(_BLOCKS):
            for j, name in enumerate(names):
                measured = self._timed_steps(self._variants[name], x, per_block)
                times[j, block * per_block : (block + 1) * per_block] = torch.tensor(measured, dtype=torch.float64)
        medians = [statistics.median(t.tolist()) for t in slowest_rank(times)]
        if self.place.rank == 0:  # should the measuring of memory fail, these are not lost
            words = ", ".join(f"{name} {median:.2f} ms" for name, median in zip(names, medians, strict=True))
            print(f"  {self.size.width} x {self.size.depth}, {tokens} tokens: {words}", file=sys.stderr, flush=True)
        rows: dict[str, Row] = {}
        for name, median in zip(names, medians, strict=True):
            variant = self._variants[name]
            rows[name] = {"step_ms": median, "host_ms": self._host_ms(variant, x), **self._parts(name, variant, x)}
        return rows

    def memory(self, tokens: Sequence[int]) -> dict[int, dict[str, Row]]:
        """For each number of tokens (ascending): memory and loss of each variant, alone on the device."""
        names = list(self._variants)
        held = list(self._variants.values())
        self._variants.clear()
        dispose(held, self.place)
        found: dict[int, dict[str, Row]] = {count: {} for count in tokens}
        for name in names:
            before = self._device_in_use()
            held = [build(name, self.place, self.size, self._options)]
            for count in tokens:
                found[count][name] = self._memory_of(held[0], count, before)
            dispose(held, self.place)
        return found

    def _build(self, name: str) -> Variant | None:
        """The variant after two steps; None, with the reason in the notes, where it cannot run."""
        error, variant = "", None
        try:
            variant = build(name, self.place, self.size, self._options)
            x = self._batch(min(self._sequence, 64))
            for _ in range(2):
                variant.forward_backward(x)
                variant.update()
            self._synchronize()
        except NotHereError as e:
            error = str(e)
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
            traceback.print_exc()
        failed = torch.tensor([float(bool(error))])
        dist.all_reduce(failed)
        if not failed.item():
            return variant
        self.notes.append(f"{name}: {error or 'another rank could not build it'}")
        held, variant = [variant] if variant is not None else [], None
        dispose(held, self.place)
        return None

    def _timed_steps(self, variant: Variant, x: torch.Tensor, steps: int) -> list[float]:
        """Milliseconds of each of ``steps`` steps in a row, after two that are not timed."""
        for _ in range(_WARM_UP):
            self._step(variant, x)
        self._synchronize()
        meet()
        if not self.place.on_gpu:
            return [self._step(variant, x) for _ in range(steps)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
        self._step(variant, x)  # the host runs ahead of the devices from here on, which meet in its collectives
        for begin, end in events:
            begin.record()
            variant.forward_backward(x)
            if self._optimizer:
                variant.update()
            end.record()
            if not self._optimizer:
                variant.update()
        self._synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    def _step(self, variant: Variant, x: torch.Tensor) -> float:
        """One step; milliseconds of its timed part on the host's clock."""
        start = time.perf_counter()
        variant.forward_backward(x)
        elapsed = time.perf_counter() - start
        variant.update()
        if self._optimizer:
            elapsed = time.perf_counter() - start
        return elapsed * 1e3

    def _host_ms(self, variant: Variant, x: torch.Tensor) -> float | None:
        """Milliseconds to enqueue a step on an idle GPU."""
        if not self.place.on_gpu:
            return None
        times = []
        for _ in range(_HOST_STEPS):
            self._synchronize()
            meet()
            times.append(self._step(variant, x))
        self._synchronize()
        return statistics.median(slowest_rank(torch.tensor(times, dtype=torch.float64)).tolist())

    def _parts(self, name: str, variant: Variant, x: torch.Tensor) -> Row:
        """Where the time of a step goes; a note where that cannot be known."""
        if not self._trace:
            return {}
        for _ in range(_WARM_UP):
            self._step(variant, x)
        found = traced(self.place, lambda: variant.forward_backward(x), variant.update)
        if isinstance(found, str):
            self.notes.append(f"{name}: no trace: {found}")
        return found if isinstance(found, dict) else {}

    def _memory_of(self, variant: Variant, tokens: int, before: int) -> Row:
        if self.place.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        x = self._batch(tokens)
        loss = torch.zeros(())
        for _ in range(_MEMORY_STEPS):
            loss = variant.forward_backward(x)
            variant.update()
        row: Row = {"loss": float(loss), "path": variant.path(), "groups": variant.groups()}
        if self.place.on_gpu:
            self._synchronize()
            arena = variant.arena_bytes()
            figures = [torch.cuda.max_memory_allocated(), self._device_in_use() - before, arena or 0]
            most = slowest_rank(torch.tensor(figures, dtype=torch.float64)).tolist()
            row["allocated_gib"], row["device_gib"] = most[0] / GiB, most[1] / GiB
            row["arena_gib"] = None if arena is None else most[2] / GiB
        return row

    def _device_in_use(self) -> int:
        """Bytes of the card that somebody holds: torch's allocator, arenas, NCCL, and other programs."""
        if not self.place.on_gpu:
            return 0
        self._synchronize()
        meet()
        free, total = torch.cuda.mem_get_info()
        meet()
        return total - free

    def _batch(self, tokens: int) -> torch.Tensor:
        return block_batch(tokens, self._sequence, self.size.width, self.place.device, 100 + self.place.rank)

    def _synchronize(self) -> None:
        if self.place.on_gpu:
            torch.cuda.synchronize()
