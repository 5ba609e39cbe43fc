"""SM-id probe: which SMs a collective keeps other thread blocks out of (paper, section 2.2 and Table 5).

A probe launch fills every SM: two thread blocks of 1,024 threads each, all that an SM has room for. Each notes its SM
and when it began, and spins. Where a collective's thread block is resident, one of the two has to wait and begins a
spin later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tide_strategies.cli.bench.interference_work import Noise, Streams, noises, run_beside
from tide_strategies.cli.bench.ranks import Place, Row

_PER_SM = 2
_WARPS = 32
_SPIN_NS = 50_000
_LAUNCHES = 100
#: Share of launches from which on an SM counts as occupied.
_OFTEN = 0.1


def probe_rows(place: Place, collectives: dict[str, Any]) -> Iterator[Row]:
    """One row per collective, and one for the probe by itself, which should find nothing."""
    streams = Streams(place.device)
    beside, pairs = noises(place, streams.noise, collectives)
    sms = torch.cuda.get_device_properties(place.device).multi_processor_count
    for noise in (None, *beside):
        _launch(place, streams, noise, sms, 3)
        records = _launch(place, streams, noise, sms, _LAUNCHES)
        hits = occupied(records, sms, _SPIN_NS)
        share = hits.float().mean(dim=0)
        yield {
            "victim": "SM-id probe",
            "beside": noise.name if noise else "nothing",
            "ranks": place.ranks,
            "shape": f"{_SPIN_NS // 1000} us",
            "ctas": _PER_SM * sms,
            "sms": int((share >= _OFTEN).sum()),
            "displaced_percent": 100 * hits.any(dim=1).float().mean().item(),
            "share_of_launches_by_sm": [round(s, 3) for s in share.tolist()],
            "notes": pairs[0].notes,
        }
    for made in pairs:
        made.close()


def occupied(records: torch.Tensor, sms: int, spin_ns: int) -> torch.Tensor:
    """For each launch and SM: whether fewer thread blocks of the probe than it has room for began at once.

    Args:
        records: ``[launches, thread blocks, 2]`` int64: SM and nanosecond of the beginning.

    Returns:
        ``[launches, sms]`` bool.
    """
    sm, begun = records[..., 0], records[..., 1]
    at_once = begun - begun.amin(dim=1, keepdim=True) < spin_ns // 2
    count = torch.zeros(records.shape[0], sms, dtype=torch.int64)
    count.scatter_add_(1, sm, at_once.long())
    return count < _PER_SM


def _launch(place: Place, streams: Streams, noise: Noise | None, sms: int, launches: int) -> torch.Tensor:
    from tide_strategies.cli.bench.probe_kernel import note_sm

    blocks = _PER_SM * sms
    out = torch.zeros(launches, blocks, 2, dtype=torch.int64, device=place.device)

    def probes() -> None:
        for record in out:
            note_sm[(blocks,)](record, _SPIN_NS, num_warps=_WARPS)

    run_beside(streams, probes, launches * _SPIN_NS / 1e6, noise)
    return out.cpu()
