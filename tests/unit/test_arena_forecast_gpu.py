"""The forecast of GPUs' arenas is what connecting them allocates, part by part, to the byte. No GPU is asked."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tide_strategies.cli.main import main
from tide_strategies.cli.plan import arena_of_gpu_ranks, uses_multicast
from tide_strategies.config import TideConfig
from tide_strategies.fsdp2 import connect
from tide_strategies.layout import align
from tide_strategies.planner import architectures, limits, memory
from tide_strategies.planner.groups import Group
from tide_strategies.planner.knobs import unmeasured
from tide_strategies.runtime.cuda import engine, nccl_rail, sum_kernels
from tide_strategies.runtime.cuda.pieces import piece_bytes, sending_bytes
from tide_strategies.runtime.hosts import Placement
from tide_strategies.topology import Topology

#: Uneven sizes; the last group stays unsharded, in some cases too large for the ring.
SIZES = [(1000, 300), (7, 333), (77,)]


class _Connected(Exception):
    """All memory has been asked for."""


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the runtime allocates for groups on a node, by part: its own code, on memory of the driver's granules."""

    def share(exchange: Any, rank: int, size: int, timeout_s: float, device: int, nbytes: int, sharing: int) -> Any:
        return engine.SharedAllocation(
            SimpleNamespace(bytes=align(nbytes, memory.GPU_GRANULE)),  # type: ignore[arg-type]
            (SimpleNamespace(address=0),) * size,  # type: ignore[arg-type]
        )

    monkeypatch.setattr(engine, "share_allocation", share)
    monkeypatch.setattr(engine, "share_multicast", lambda *_: SimpleNamespace(address=0))
    monkeypatch.setattr(
        engine.cuda.Multicast, "whole_bytes", lambda device, devices, nbytes: align(nbytes, memory.GPU_GRANULE)
    )
    monkeypatch.setattr(engine.cuda, "Control", _Control)
    monkeypatch.setattr(engine.cuda, "be_patient", lambda seconds: None)
    monkeypatch.setattr(engine.SharedArena, "create", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(engine, "CallOrder", lambda *_: SimpleNamespace(look=lambda: None))
    monkeypatch.setattr(engine, "Watchdog", lambda *_: SimpleNamespace(stopped=True, close=lambda: None))
    monkeypatch.setattr(connect.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sum_kernels, "sum_kernels", lambda device: None)

    registered: list[tuple[Any, int]] = []
    rail = SimpleNamespace(
        register=lambda space, index, memory: registered.append((space, memory.bytes)), close=lambda: None
    )
    monkeypatch.setattr(nccl_rail, "connect_rail", lambda *_, **options: rail)
    monkeypatch.setattr(engine.SharedAllocation, "mapping", lambda self, rank: self.own)

    def connected(
        groups: list[Group], topology: Topology, knobs: Any, config: TideConfig, multicast: bool, rail: Any = "none"
    ) -> Any:
        registered.clear()
        seen: list[Any] = []

        def homes(made: Any, members: Any, options: Any, *_: Any) -> None:
            connect._homes(made, members, options)
            seen.append(made)
            raise _Connected

        monkeypatch.setattr(connect, "_device_groups", homes)
        members = [_member(g, topology.ranks) for g in groups]
        placement = Placement(topology, rail, "", multicast="on" if multicast else "off")
        ranks = SimpleNamespace(rank=lambda: 0, size=lambda: topology.ranks)
        with pytest.raises(_Connected):
            connect._connect_devices(lambda p: [p] * topology.ranks, ranks, members, config, knobs, placement)
        parts = seen[0].bytes_by_part()
        # What NCCL is told of is the arena's, and not in addition to it.
        told = {space.value for space, _ in registered}
        assert told == ({"stage", "outbox", "inbox"} & parts.keys() if rail == "nccl_rma" else set())
        assert all(sum(n for space, n in registered if space.value == part) == parts[part] for part in told)
        return parts

    return connected


class _Control:
    control_bytes = staticmethod(engine.cuda.Control.control_bytes)

    def __init__(self, *_: Any) -> None:
        pass


def _member(group: Group, ranks: int) -> Any:
    stands_for = SimpleNamespace(_reshard_after_forward=group.resharded, device=SimpleNamespace(type="cuda"))
    return SimpleNamespace(group=stands_for, layout=group.layout(ranks), name=group.name)


@pytest.mark.parametrize(
    ("ranks", "stated", "multicast"),
    [
        (2, "auto", False),
        (2, "on", True),
        (3, "auto", True),
        (8, "auto", True),
        (8, "off", False),
        (4, "on", True),
    ],
)
@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
def test_the_forecast_is_what_the_runtime_allocates(
    allocated: Any, ranks: int, stated: str, multicast: bool, mode: str
) -> None:
    topology = Topology(1, ranks)
    assert uses_multicast(topology, stated) == multicast
    for last, slots in ((SIZES, 2), ([*SIZES, (5000, 4000)], 3)):
        groups = [architectures.block(f"block {i}", SIZES, 2) for i in range(4)]
        groups.append(architectures.block("head", last, 2, resharded=False))
        knobs = unmeasured("cuda", topology, [g.layout(ranks) for g in groups])
        forecast = arena_of_gpu_ranks(
            groups, topology, knobs=knobs, ring=memory.Ring(slots=slots), mode=mode, multicast=multicast
        )
        config = TideConfig.from_any({"all_gather.slots": slots, "reduce_scatter.mode": mode})
        assert allocated(groups, topology, knobs, config, multicast) == forecast
        assert ("stage" in forecast) == multicast


@pytest.mark.parametrize("rail", ["local", "nccl_rma"])
@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
@pytest.mark.parametrize(
    ("form", "multicast", "stated"),
    [
        ((2, 1), False, {}),
        ((2, 2), False, {}),
        ((2, 2), True, {"passes": 3, "chunk_bytes": 1 << 16}),
        ((3, 2), False, {"passes": 2, "round_width": 1}),
        ((2, 3), True, {}),
        ((4, 2), False, {"round_width": 2}),
        ((9, 1), False, {"passes": 2}),  # a lane of more than one wave has waves of two levels on GPUs
    ],
)
def test_the_forecast_of_nodes_is_what_the_runtime_allocates_whatever_the_rail(
    allocated: Any, form: tuple[int, int], multicast: bool, stated: dict[str, int], mode: str, rail: str
) -> None:
    topology = Topology(*form)
    groups = [architectures.block(f"block {i}", [(3001, 700), (77,)], 2) for i in range(3)]
    groups.append(architectures.block("head", [(5000, 900)], 2, resharded=False))
    knobs = unmeasured("cuda", topology, [g.layout(topology.ranks) for g in groups], **stated)
    forecast = arena_of_gpu_ranks(groups, topology, knobs=knobs, ring=memory.Ring(), mode=mode, multicast=multicast)
    config = TideConfig.from_any({"reduce_scatter": {"mode": mode, **stated}})
    assert allocated(groups, topology, knobs, config, multicast, rail) == forecast
    assert {"stage", "outbox", "inbox", "spare"} <= forecast.keys()


def test_passes_and_slot_reuse_are_in_the_forecast_of_nodes() -> None:
    """They change what a rank holds, or the test above would show less than it seems to."""
    topology, groups = Topology(16, 2), [architectures.block("block", [(1 << 15, 4096)], 2)] * 3
    held = {}
    for passes in (1, 4):
        for mode in ("in_place", "slot_reuse"):
            knobs = unmeasured("cuda", topology, [g.layout(32) for g in groups], passes=passes)
            parts = arena_of_gpu_ranks(groups, topology, knobs=knobs, ring=memory.Ring(), mode=mode, multicast=False)
            held[passes, mode] = parts["outbox"] + parts["inbox"]
    assert held[1, "slot_reuse"] < held[1, "in_place"]
    assert held[4, "in_place"] != held[1, "in_place"]
    assert held[4, "slot_reuse"] < held[1, "slot_reuse"]


def test_the_command_counts_nodes_to_the_byte_and_says_where_it_no_longer_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, says in (
        (1 << 12, "(exact, on each GPU, with multicast)"),
        (4, "(closed form (paper, section 5.4), on"),
    ):
        monkeypatch.setattr(limits, "MOST_COUNTED", most)
        assert main(["plan", "wan2.2-14b", "--topology", "2x4"]) == 0
        text = capsys.readouterr().out
        assert says in text
        # What messages would pin is said beside it: twins of what peers put into, and pieces for one peer.
        arena, pinned = (
            dict(re.findall(r"^(\w+) +(\d+) ", part, re.M)) for part in text.split("Pinned host memory for")
        )
        assert {k: pinned[k] for k in ("stage", "inbox")} == {k: arena[k] for k in ("stage", "inbox")}
        assert int(pinned["pieces"]) == sending_bytes(2) == 2 * 4 * ((4 << 20) + 4)


def test_pieces_share_their_memory_among_peers_and_stay_long_enough_to_be_worth_a_message() -> None:
    assert [piece_bytes(nodes) for nodes in (2, 3, 5, 8, 129, 1024)] == [
        *(4 << 20, 4 << 20, 2 << 20, 1196032, 1 << 16, 1 << 16)
    ]
    assert all(sending_bytes(n) <= (64 << 20) + 32 * (n - 1) for n in range(2, 130))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "with multicast"),
        (("--multicast", "off"), "without multicast"),
        (("--gpus", "2"), "without multicast"),
        (("--gpus", "2", "--multicast", "on"), "with multicast"),
    ],
)
def test_the_command_says_which_it_is(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "wan2.2-14b", "--gpus", "4", *words]) == 0
    text = capsys.readouterr().out
    assert f"(exact, on each GPU, {says})" in text
    assert ("\nstage " in text) == (says == "with multicast")
    assert "Pinned host memory" not in text, "a node sends no messages"
