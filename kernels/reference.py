"""The sum kernel's promise in torch, for tests and for checking a launch: same order, same roundings, any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tide_strategies.kernels.tiles import ALIGNED_ELEMENTS, LAND_HEAD_WORDS, LAND_SOURCE_WORDS, TILE_WORDS

#: torch's dtypes by the names that kernels use, and by the names that people use.
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "f32": torch.float32,
    "float32": torch.float32,
}


def reference(
    tiles: torch.Tensor,
    staging: torch.Tensor,
    output: torch.Tensor,
    factor: float,
    divides: bool,
    gradients: Sequence[torch.Tensor],
    staged: int,
) -> None:
    """Write ``(((s_0 + s_1) + ...) + own) * factor`` to ``output`` for every row of ``tiles``.

    Args:
        tiles: int64 (tiles, TILE_WORDS), see ``TileWord``; any device.
        staging, output: flat tensors; gradients: flat tensors that the rows index.
        staged: staged sources of a tile, added in their order before the own gradient.
        divides: sums are divided by ``factor``, not multiplied with it.
    """
    for pointer, own, offset, stride, out, count in tiles.view(-1, TILE_WORDS).tolist():
        sources = [staging[offset + s * stride :][:count] for s in range(staged)]
        sources.append(gradients[pointer][own:][:count])
        total = sources[0].float()
        for source in sources[1:]:
            total = total + source.float()
        output[out : out + count] = _scaled(total, factor, divides).to(output.dtype)


def land_reference(
    tiles: torch.Tensor,
    output: torch.Tensor,
    factor: float,
    divides: bool,
    partials: Sequence[torch.Tensor],
    sources: int,
    accumulate: bool,
) -> None:
    """Write ``[out +] ((s_0 + s_1) + ...) * factor`` to ``output`` for every row of ``tiles`` (``kernels.land``).

    As :func:`reference`; ``partials``: flat fp32 tensors that the rows index.
    """
    for row in tiles.view(-1, LAND_HEAD_WORDS + LAND_SOURCE_WORDS * sources).tolist():
        (out, count), places = row[:LAND_HEAD_WORDS], row[LAND_HEAD_WORDS:]
        total = None
        for pointer, offset in zip(places[::2], places[1::2], strict=True):
            partial = partials[pointer][offset:][:count]
            total = partial if total is None else total + partial
        assert total is not None
        total = _scaled(total, factor, divides)
        if accumulate:
            total = output[out : out + count].float() + total
        output[out : out + count] = total.to(output.dtype)


def _scaled(total: torch.Tensor, factor: float, divides: bool) -> torch.Tensor:
    # Not by a number of the host: on a GPU torch multiplies by its reciprocal.
    by = torch.tensor(factor, dtype=torch.float32, device=total.device)
    return total / by if divides else total * by


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, but for the payloads of NaNs, which hardware chooses."""
    bits = {2: torch.int16, 4: torch.int32}[left.element_size()]
    equal = (left.view(bits) == right.view(bits)) | (left.isnan() & right.isnan())
    return left.dtype == right.dtype and bool(equal.all())


@dataclass(frozen=True)
class Trial:
    """A small sum to launch and to compare: the arguments of one launch, with ``output`` still unwritten."""

    tiles: torch.Tensor
    staging: torch.Tensor
    output: torch.Tensor
    factor: float
    divides: bool
    gradients: tuple[torch.Tensor, ...]
    staged: int
    #: Of landing: how many partials are added, and whether to what the output holds.
    landed: int = 0
    accumulate: bool = False

    def arguments(self, first: int, count: int, pointers: int) -> tuple[Any, ...]:
        """The arguments of a launch over rows ``first`` to ``first + count``, in the kernels' order."""
        scaling = self.factor, int(self.divides)
        return self.tiles, first, count, self.staging, self.output, *scaling, self.addresses(pointers)

    def addresses(self, pointers: int) -> tuple[int, ...]:
        """The gradients' addresses, padded with zeros to the ``pointers`` scalars of a kernel."""
        own = tuple(gradient.data_ptr() for gradient in self.gradients)
        return own + (0,) * (pointers - len(own))

    def write(self, output: torch.Tensor) -> None:
        """Write the promised sums to ``output``."""
        if self.landed:
            land_reference(self.tiles, output, self.factor, self.divides, self.gradients, self.landed, self.accumulate)
        else:
            reference(self.tiles, self.staging, output, self.factor, self.divides, self.gradients, self.staged)

    def passes(self, launch: Callable[[Trial], None]) -> bool:
        """Whether ``launch``, which must finish its work, writes the promised bytes and no others."""
        expected = self.output.clone()
        self.write(expected)
        launch(self)
        return same_bytes(self.output, expected)


def make_trial(
    staged: int,
    gradients: int,
    tile: int,
    grad_dtype: str,
    out_dtype: str,
    aligned: bool,
    device: torch.device | str | int,
    *,
    tiles: int = 7,
    seed: int = 0,
    factor: float = 3.0,
    divides: bool = True,
) -> Trial:
    """A trial of ``tiles`` tiles over ``gradients`` gradients: full, odd and empty ones, with gaps in the output.

    Values are random with magnitudes far apart, so that another order of additions shows; and the sums are divided by
    3, or as said, so that multiplying by a reciprocal does. Every gap of the output holds -7, which a launch must leave
    alone.
    """
    random = torch.Generator().manual_seed(seed)
    step = ALIGNED_ELEMENTS if aligned else 1
    gap = step if aligned else 3

    def values(count: int) -> torch.Tensor:
        scale = torch.randint(-6, 7, (count,), generator=random).float().exp2()
        return (torch.randn(count, generator=random) * scale).to(DTYPES[grad_dtype]).to(device)

    def offset(limit: int) -> int:
        return int(torch.randint(0, limit, (1,), generator=random)) * step

    counts = [(tile, tile - 1, 1, 0, tile // 2 + 3, tile - 8, 5)[i % 7] for i in range(tiles)]
    rows, out = [], gap
    stride = tile * tiles + gap * (tiles + 1)
    for i, count in enumerate(counts):
        # Neighbours share a gradient, as the tiles of one parameter do, and every gradient has its turn.
        pointer = (i // 2) * max(1, gradients // max(1, (tiles + 1) // 2)) % gradients
        rows.append((pointer, offset(5), (tile + gap) * i, stride, out, count))
        out += -(-count // step) * step + gap
    return Trial(
        tiles=torch.tensor(rows, dtype=torch.int64).to(device),
        staging=values(max(1, stride * staged)),
        output=torch.full((out,), -7.0, dtype=DTYPES[out_dtype]).to(device),
        factor=factor,
        divides=divides,
        gradients=tuple(values(tile + 5 * step + 8) for _ in range(gradients)),
        staged=staged,
    )


def make_land_trial(
    sources: int,
    places: int,
    tile: int,
    out_dtype: str,
    accumulate: bool,
    aligned: bool,
    device: torch.device | str | int,
    *,
    tiles: int = 7,
    seed: int = 0,
    factor: float = 3.0,
    divides: bool = True,
) -> Trial:
    """A trial of landing ``sources`` partials a tile, out of ``places`` tensors in turn; as :func:`make_trial`.

    Under ``accumulate`` the output holds random values, else -7.
    """
    random = torch.Generator().manual_seed(seed)
    step = ALIGNED_ELEMENTS if aligned else 1
    counts = [(tile, tile - 1, 1, 0, tile // 2 + 3, tile - 8, 5)[i % 7] for i in range(tiles)]
    rows: list[tuple[int, ...]] = []
    out = step
    for i, count in enumerate(counts):
        at = [int(torch.randint(0, 5, (1,), generator=random)) * step for _ in range(sources)]
        rows.append((out, count, *(w for s in range(sources) for w in ((i + s) % places, at[s]))))
        out += -(-count // step) * step + step

    def values(count: int) -> torch.Tensor:
        return torch.randn(count, generator=random) * torch.randint(-6, 7, (count,), generator=random).float().exp2()

    output = values(out) if accumulate else torch.full((out,), -7.0)
    return Trial(
        tiles=torch.tensor(rows, dtype=torch.int64).to(device),
        staging=torch.zeros(1).to(device),
        output=output.to(DTYPES[out_dtype]).to(device),
        factor=factor,
        divides=divides,
        gradients=tuple(values(tile + 5 * step).to(device) for _ in range(places)),
        staged=0,
        landed=sources,
        accumulate=accumulate,
    )
