"""How fast a machine moves, sums and signals: the numbers that plans and predictions are made of.

Bytes per second and seconds throughout (1 GB = 1e9 bytes). ``PAPER`` is the paper's evaluation platform, ``H200_PAIR``
two H200 of one host, and calibration (``planner/calibrate.py``) measures the machine at hand.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tide_strategies.config import LEAST_CHUNK, MOST_CHUNK
from tide_strategies.errors import TideConfigError

GB = 1e9
MIB = 2**20
#: The paper quotes 2.2 to 4 times, depending on the clock (section 2.4).
PULL_TAX = 2.2
#: Bounds of what is believed: bytes/s, seconds, and the tax. Nothing that moves anything is slower than the first, and
#: no machine comes near the others; within them the solver and the simulator stay finite.
LEAST_RATE, MOST_RATE, MOST_TIME_S, MOST_TAX = 1.0, 1e18, 1e4, 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Sustained rates of one rank (a GPU, or a process) and its links.

    Args:
        name: where the numbers come from, for people. push: bytes/s of a rank's copies to peers of its node, all
        together (copy engines; a CPU process copies itself). intake: bytes/s that a rank can take in from its peers.
        multicast: whether one copy reaches every rank of the node (NVSwitch, or one landing that all map). local:
        bytes/s of copies within a rank's own memory. memory: bytes/s of a rank's memory, reads and writes together.
        pull_tax: memory traffic that a byte read by a peer counts as, where a byte written by one counts as 1 (section
        2.4). sum_per_cta: bytes/s, read plus write, of one thread block that sums (paper: BW_sum). A CPU process is
        one. land_per_cta: fp32 output bytes/s of one thread block that lands node partials (paper: BW_land). land_cap:
        output bytes/s that the landing fabric allows (paper: BW_cap). rail: bytes/s of one rank's rail, each direction
        (paper: BW_NIC). call_s: seconds from the call of a collective to its first operation. start_s: seconds that a
        batch of copies, or a kernel, takes beside moving its bytes. own_copy_s: seconds that each copy within a GPU's
        own memory takes beside that, since these do not merge in a batch. signal_s: seconds from a notify to the end of
        the wait for it, within a node. wait_s: seconds that a stream stops at a wait which is over already.
        rail_signal_s: as signal_s across nodes, one way. round_wait_s: calibrated wait of one network round (paper:
        t_rnd); the solver's, see ``planner/sizing.py``. chunk_s: seconds of the host for one more chunk of a
        reduce-scatter. chunk_cap: bytes of a contribution from which on a larger chunk gains nothing: on CPUs what is
        still in a cache when its owner reads it, on GPUs a bound on staging.

    Raises:
        TideConfigError: a rate is not from 1 to 1e18 bytes/s, a time not from 0 to 1e4 s, ``pull_tax`` not from 1 to
            1000, or no chunk has the size ``chunk_cap``.
    """

    name: str
    push: float
    intake: float
    multicast: bool
    local: float
    memory: float
    pull_tax: float
    sum_per_cta: float
    land_per_cta: float
    land_cap: float
    rail: float
    call_s: float
    start_s: float
    own_copy_s: float
    signal_s: float
    wait_s: float
    rail_signal_s: float
    round_wait_s: float
    chunk_s: float
    chunk_cap: float

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "name":
                good, wanted = isinstance(value, str), "text"
            elif f.name == "multicast":
                good, wanted = isinstance(value, bool), "true or false"
            else:
                low, high, unit = bounds(f.name)
                good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
                wanted = f"a number from {low:g} to {high:g}{unit}"
            if not good:
                raise TideConfigError(f"rate {f.name!r} must be {wanted}; got {reprlib.repr(value)[:80]}")

    def to_dict(self) -> dict[str, Any]:
        """The rates as plain values, which :meth:`from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Rates:
        """Read what :meth:`to_dict` wrote.

        Raises:
            TideConfigError: not a mapping of exactly these names to values that are allowed.
        """
        names = [f.name for f in fields(cls)]
        if not isinstance(data, Mapping) or set(data) != set(names):
            got = reprlib.repr(sorted(map(str, data))) if isinstance(data, Mapping) else type(data).__name__
            raise TideConfigError(f"rates are a mapping with exactly {', '.join(names)}; got {got}")
        return cls(**data)


def bounds(name: str) -> tuple[float, float, str]:
    """What a number of :class:`Rates` may be, and its unit."""
    if name == "chunk_cap":
        return LEAST_CHUNK, MOST_CHUNK, " bytes"
    if name == "pull_tax":
        return 1.0, MOST_TAX, ""
    return (0.0, MOST_TIME_S, " seconds") if name.endswith("_s") else (LEAST_RATE, MOST_RATE, " bytes per second")


#: The paper's platform: eight GPUs per NVSwitch domain, one 400 Gb/s rail each. Sources: intake, Table 3 (served
#: traffic of copy-engine pushes); sum, landing, rail and round wait, appendix G; rail signal, half the "roughly 0.12 ms
#: signal round trip" of section 3.1. ``call_s`` is not stated: with the entry fence and the completion it makes the
#: 0.04 ms that Table 7's one-node rows (0.38 and 1.40 ms for 32 and 128 MiB) take beyond their bytes. ``signal_s`` and
#: ``start_s`` are near those of two H200. ``push`` is fitted to Table 8's one-node rows (0.41 and 1.29 ms), close to
#: one H200 copy engine's. ``memory`` and ``local`` are the data sheet's HBM rate of such a GPU and half of it.
#: ``chunk_cap`` is what Table 8's buffers on one node imply, ``chunk_s`` that of two H200. Waits that are over are in
#: ``call_s``.
PAPER = Rates(
    name="paper",
    push=400 * GB,
    intake=798 * GB,
    multicast=True,
    local=4000 * GB,
    memory=8000 * GB,
    pull_tax=PULL_TAX,
    sum_per_cta=99 * GB,
    land_per_cta=21 * GB,
    land_cap=90 * GB,
    rail=47.5 * GB,
    call_s=25e-6,
    start_s=2.6e-6,
    own_copy_s=0.0,
    signal_s=4.8e-6,
    wait_s=0.0,
    rail_signal_s=60e-6,
    round_wait_s=1.3e-3,
    chunk_s=20e-6,
    chunk_cap=16 * MIB,
)

#: Two H200 of one host, NVLink, no multicast (docs/benchmarks.md): copy-engine push 393 GB/s in both directions at
#: once, local copy 4.2 TB/s read plus write, 6.5 us for a stream memory write and the wait for it by the other GPU,
#: 3.3 us for a wait that is over, 2.4 us for the smallest copy, 58 GB/s per thread block of the sum of two
#: contributions. ``call_s`` is what an all-gather that follows another takes beside all that, ``chunk_s`` the host's
#: time for the four calls of one more chunk. There is no rail: the numbers of one are those of ``PAPER``.
H200_PAIR = Rates(
    name="two H200",
    push=393 * GB,
    intake=393 * GB,
    multicast=False,
    local=2100 * GB,
    memory=4200 * GB,
    pull_tax=PULL_TAX,
    sum_per_cta=58 * GB,
    land_per_cta=PAPER.land_per_cta,
    land_cap=PAPER.land_cap,
    rail=PAPER.rail,
    call_s=10.7e-6,
    start_s=2.4e-6,
    own_copy_s=3.8e-6,
    signal_s=6.5e-6,
    wait_s=3.3e-6,
    rail_signal_s=PAPER.rail_signal_s,
    round_wait_s=PAPER.round_wait_s,
    chunk_s=20e-6,
    chunk_cap=32 * MIB,
)

#: Two processes on the two cores of docs/benchmarks.md (fitted to its rows of 32 MiB and 2 ranks): one memory for all,
#: a process that copies and sums by itself. Groups that fit into a cache are faster.
CPU_PAIR = Rates(
    name="two CPU cores",
    push=11.4 * GB,
    intake=11.4 * GB,
    multicast=True,
    local=11.4 * GB,
    memory=46 * GB,
    pull_tax=1.0,
    sum_per_cta=20 * GB,
    land_per_cta=20 * GB,
    land_cap=20 * GB,
    rail=1 * GB,
    call_s=2e-6,
    start_s=0.2e-6,
    own_copy_s=0.0,
    signal_s=3e-6,
    wait_s=0.0,
    rail_signal_s=100e-6,
    round_wait_s=1e-3,
    chunk_s=3e-6,
    chunk_cap=MIB // 2,
)

#: Rates that have a name on the command line.
NAMED = {"paper": PAPER, "h200-pair": H200_PAIR, "cpu-pair": CPU_PAIR}


def built_in(device: str) -> Rates:
    """What is taken for the rates of ranks on ``device`` ("cpu" or "cuda") where nothing has been measured."""
    return CPU_PAIR if device == "cpu" else H200_PAIR
