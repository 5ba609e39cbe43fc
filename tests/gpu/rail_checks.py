"""What rails between nodes of GPUs must do, whichever they are: bring bytes, keep their order, and train over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import BF16, Case, build, full_parameters, train
from test_fsdp2_gpu import SLOT_REUSE, deterministic

from tide_strategies import apply_tide
from tide_strategies.collectives.schedule import Space
from tide_strategies.runtime.cuda.rail import DeviceRail, Part

MIB = 1 << 20
PLACE = (Space.LANDING, 0)
HALF = 72 * MIB  # of the arena: sources, then landings
SIZES = [16, 17, 4096, 65536 + 3, MIB, 16 * MIB, 64 * MIB]


def _pattern(rank: int, nbytes: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * rank + nbytes)
    return torch.randint(0, 256, (nbytes,), generator=random, dtype=torch.uint8).cuda()


def all_ready() -> None:
    torch.cuda.synchronize()
    dist.barrier()


def wrong_bytes(rank: int, rail: DeviceRail, memory: torch.Tensor) -> list[str]:
    """Sizes whose bytes did not arrive, or with more than theirs written. One way at a time.

    Both at once, each rank's put would come after its own wait: NCCL keeps the order of a communicator's operations.
    """
    wrong, send, receive = [], torch.cuda.Stream(), torch.cuda.Stream()
    for turn, nbytes in enumerate(SIZES * 2):
        counter, sender = turn % 4, turn // len(SIZES)
        memory[:nbytes] = _pattern(rank, nbytes)
        memory[HALF : HALF + nbytes + 64] = 0xEE
        all_ready()
        if rank == sender:
            rail.put(1 - rank, memory.data_ptr(), nbytes, *PLACE, HALF + 16, counter, send.cuda_stream)
        else:
            rail.take(sender, counter, 1, receive.cuda_stream, [Part(*PLACE, HALF + 16, nbytes)])
            with torch.cuda.stream(receive):  # what is there at that moment
                got = memory[HALF : HALF + nbytes + 64].clone()
        all_ready()
        if rank == sender:
            continue
        edges = bool((got[:16] == 0xEE).all()) and bool((got[nbytes + 16 :] == 0xEE).all())
        if not (edges and torch.equal(got[16 : nbytes + 16], _pattern(sender, nbytes))):
            wrong.append(f"{nbytes} bytes")
    return wrong


def out_of_order(rank: int, rail: DeviceRail, memory: torch.Tensor) -> list[int]:
    """Puts for one counter that were not wholly there when their own signal was. All signals count alike."""
    count, nbytes, wrong = 16, 4 * MIB, []
    for sender in (0, 1):
        for i in range(count):
            memory[i * nbytes : (i + 1) * nbytes] = i + 1
        memory[HALF : HALF + count * nbytes] = 0
        all_ready()
        stream, ends = torch.cuda.Stream(), []
        for i in range(count):
            if rank == sender:
                source = memory[i * nbytes :].data_ptr()
                rail.put(1 - rank, source, nbytes, *PLACE, HALF + i * nbytes, 0, stream.cuda_stream)
                continue
            rail.take(sender, 0, 1, stream.cuda_stream, [Part(*PLACE, HALF + i * nbytes, nbytes)])
            with torch.cuda.stream(stream):
                landed = memory[HALF + i * nbytes : HALF + (i + 1) * nbytes]
                ends.append(torch.stack([landed.min(), landed.max()]))
        all_ready()
        wrong += [i for i, e in enumerate(ends) if e.tolist() != [i + 1, i + 1]]
    return wrong


TRAINED = [
    Case("fp32"),
    Case("uneven rows in bf16", uneven=True, policy=BF16),
    Case("bf16 reduction", policy={"param_dtype": torch.bfloat16}),
    Case("slot reuse", policy=BF16, accumulate=2, config=SLOT_REUSE),
    Case(
        "everything cached",
        policy=BF16,
        accumulate=3,
        config={"all_gather.cache": "microbatch", "all_gather.slots": 4},
    ),
]


def train_over(rank: int, world: int, arg: tuple[str, str, list[Case]]) -> dict[str, dict[str, Any]]:
    """By case: whether losses and parameters are those over peer memory, to the bit, and what each report says."""
    other, topology, cases = arg
    deterministic()
    out: dict[str, dict[str, Any]] = {}
    for case in cases:
        results, placed, pinned = [], [], []
        for rail in ("local", other):
            model = build(case, world, device="cuda")
            options = {"timeout_s": 30, "strict": True, "topology": topology, "rail": rail, **case.config}
            handle = apply_tide(model, options)
            losses = train(model, case, rank)
            report = handle.report()
            placed.append({(g.path, g.topology, g.rail) for g in report.groups})
            pinned.append(set(report.pinned_bytes))
            results.append((losses, full_parameters(model)))
            torch.cuda.synchronize()
            handle.close()
        (losses, values), (railed, got) = results
        equal = losses == railed and all(torch.equal(got[n], values[n]) for n in values)
        out[case.name] = {"equal": equal, "losses": len(losses), "placed": placed, "pinned": pinned}
    return out
