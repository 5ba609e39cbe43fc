"""CUDA graph capture: what is enqueued meanwhile runs later and again, so no collective of ours may be among it."""

from __future__ import annotations

import torch

from tide_strategies.detect import fallback
from tide_strategies.errors import TideError


def capturing() -> bool:
    """Whether the current stream is being captured. False wherever there is no GPU."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, name: str) -> None:
    """Raise a TideError with code TIDE-F018 if a collective of the group ``name`` is about to be captured."""
    if device.type == "cuda" and capturing():
        verdict = fallback("TIDE-F018")
        raise TideError(f"TIDE: {verdict.code} {verdict.reason} in {name!r}; {verdict.remedy}")
