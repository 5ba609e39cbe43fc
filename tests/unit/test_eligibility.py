"""Verdicts of real FSDP2 groups, built on the meta device over ranks that do not exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from tide_strategies.cli.offline import imagined_job
from tide_strategies.config import TideConfig
from tide_strategies.detect import Verdict, fallback
from tide_strategies.errors import TideError, TideFallbackError
from tide_strategies.fsdp2 import access, capture, install
from tide_strategies.fsdp2.describe import lazy_init_on_meta
from tide_strategies.fsdp2.eligibility import group_verdict, stated_topology
from tide_strategies.fsdp2.param_group import TideParamGroup
from tide_strategies.fsdp2.reduce import dispatch
from tide_strategies.runtime.cuda import capability


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with imagined_job(16):
        yield


def verdicts(
    change: Callable[[Any], None] = lambda model: None, parameters: int = 2, whole: bool = False, **options: Any
) -> list[Any]:
    """Codes (or ``whole`` verdicts) of two blocks with ``parameters`` vectors each; fully_shard, then ``change``."""
    with torch.device("meta"):
        blocks = [nn.ParameterList([nn.Parameter(torch.empty(32)) for _ in range(parameters)]) for _ in range(2)]
        model = nn.ModuleList(nn.Sequential() for _ in blocks)
        for block, params in zip(model, blocks, strict=True):
            block.weights = params
    mesh = init_device_mesh("cpu", (16,))
    for block in model:
        fully_shard(block, mesh=mesh)
        change(block)
    groups = [g for root in model for g in access.param_groups(root)]
    for root in model:
        lazy_init_on_meta(root)
    found = [group_verdict(g, TideConfig.from_any(options)) for g in groups]
    return found if whole else [v.code for v in found]


def on(device: str) -> Callable[[Any], None]:
    """Move a block's group there, by name only."""

    def change(block: Any) -> None:
        for group in access.param_groups(block):
            group.device = torch.device(device)

    return change


def test_many_parameters_are_no_obstacle_on_cpu_ranks() -> None:
    assert verdicts(parameters=300) == ["TIDE-OK", "TIDE-OK"]


@pytest.mark.parametrize(
    ("parameters", "frozen", "capturing", "code"),
    [
        (256, 0, False, "TIDE-OK"),
        (257, 0, False, "TIDE-F017"),
        (300, 44, False, "TIDE-OK"),
        (2, 0, True, "TIDE-F018"),
    ],
)
def test_what_a_gpu_cannot_sum_or_capture(parameters: int, frozen: int, capturing: bool, code: str) -> None:
    """Only the device's name is made up: the verdict reads no other property of a GPU after the capability check."""

    def freeze(block: Any) -> None:
        for p in list(block.parameters())[:frozen]:
            p.requires_grad_(False)
        for group in access.param_groups(block):
            group.device = torch.device("cuda")

    with (
        mock.patch("tide_strategies.fsdp2.eligibility._device_verdict", return_value=None),
        mock.patch.object(capture, "capturing", return_value=capturing),
    ):
        assert verdicts(freeze, parameters) == [code, code]


def test_a_device_without_a_transport_has_its_code() -> None:
    assert verdicts(on("xpu")) == ["TIDE-F009", "TIDE-F009"]


DRIVER = {"available": True, "reason": "", "driver_version": 13000}
DEVICE = {"name": "GPU", "stream_mem_ops": True, "posix_fd": True}


@pytest.mark.parametrize(
    ("driver", "device", "queues", "triton", "words"),
    [
        ({"available": False, "reason": "there is no driver"}, {}, None, True, "there is no driver"),
        ({"driver_version": 11080}, {}, None, True, "the driver has CUDA 11.8"),
        ({}, {"stream_mem_ops": False}, None, True, "GPU has no stream memory operations"),
        ({}, {"posix_fd": False}, None, True, "GPU cannot share memory by file descriptor"),
        ({}, {}, "8 hardware queues", True, "8 hardware queues"),
        ({}, {}, None, False, "triton is not installed"),
        ({"driver_version": 12000}, {}, None, True, ""),
    ],
)
def test_a_gpu_that_lacks_something_has_its_code_and_the_words(
    driver: dict[str, Any], device: dict[str, Any], queues: str | None, triton: bool, words: str
) -> None:
    """The driver is made up; what is asked of it, and what becomes of the answer, is the real thing."""
    native = mock.Mock()
    native.probe.return_value = DRIVER | driver
    native.device_info.return_value = DEVICE | device
    found: list[Any] = []
    with (
        mock.patch.multiple(capability, cuda=native, missing_queues=lambda: queues),
        mock.patch("importlib.util.find_spec", return_value=object() if triton else None),
        mock.patch("torch.cuda.current_device", return_value=0),
    ):
        capability.missing_capability.cache_clear()
        try:
            found = verdicts(on("cuda"), whole=True)
        finally:
            capability.missing_capability.cache_clear()
    expected = fallback("TIDE-F016", words) if words else Verdict()
    assert found == [expected, expected]


def test_a_group_without_parameters_has_its_code() -> None:
    """FSDP2 makes none, so one is emptied."""
    assert verdicts(lambda block: access.param_groups(block)[0].fsdp_params.clear()) == ["TIDE-F011", "TIDE-F011"]


def test_a_capture_that_begins_later_is_refused() -> None:
    group = SimpleNamespace(
        device=torch.device("cuda"),
        _all_gather_result=None,
        is_unsharded=False,
        unshard_in_backward=True,
        _training_state=None,
        _module_fqn="blocks.0",
        fsdp_params=[],
    )
    with (
        mock.patch.object(capture, "capturing", return_value=True),
        pytest.raises(TideError, match=r"TIDE-F018 a CUDA graph is being captured in 'blocks.0'; capture what"),
    ):
        TideParamGroup.unshard(group)  # type: ignore[arg-type]


def test_a_capture_that_begins_with_a_reduction_is_refused() -> None:
    """Parameters that stay unsharded need no all-gather first."""
    param = SimpleNamespace(_tide_group=SimpleNamespace(path=object()), _param_fqn="head.weight")
    gradient = SimpleNamespace(device=torch.device("cuda"))
    arguments = dict.fromkeys(inspect.signature(collectives.foreach_reduce).parameters)
    with (
        mock.patch.object(capture, "capturing", return_value=True),
        pytest.raises(TideError, match=r"TIDE-F018 a CUDA graph is being captured in 'head.weight'"),
    ):
        dispatch(**{**arguments, "fsdp_params": [param], "unsharded_grads": [gradient]})


def test_a_first_forward_that_is_captured_leaves_all_to_stock_and_asks_nobody() -> None:
    """Whatever ranks could exchange there would be captured too, or end the capture."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    mesh = init_device_mesh("cpu", (16,))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    asked = mock.Mock(side_effect=AssertionError("nothing may be exchanged"))
    with (
        mock.patch.object(capture, "capturing", return_value=True),
        mock.patch.multiple(install, agree_on_groups=asked, process_group_exchange=asked, connect=asked),
    ):
        made = install.Installation(model, TideConfig())
        codes = [g.verdict.code for g in made.groups]
        paths = [g.report().path for g in made.groups]
        made.close()
        with pytest.raises(TideFallbackError, match="TIDE-F018"):
            install.Installation(model, TideConfig(strict=True))
    assert codes == ["TIDE-F018"] * 2
    assert paths == ["stock"] * 2


@pytest.mark.parametrize(
    "setter",
    [
        lambda block: block.set_allocate_memory_from_process_group_for_comm(True),
        lambda block: [g.set_symm_mem("NCCL") for g in access.param_groups(block)],
    ],
    ids=["allocator of the process group", "symmetric memory"],
)
def test_memory_that_the_user_chose_for_stock_collectives_is_never_overruled(setter: Callable[[Any], None]) -> None:
    def change(block: Any) -> None:
        if not hasattr(access.param_groups(block)[0], "set_symm_mem"):
            pytest.skip("this torch has no symmetric memory for FSDP2")
        setter(block)

    with mock.patch("torch.distributed._symmetric_memory.set_backend"):  # a torch for CPUs has none
        codes = verdicts(change)
    assert codes == ["TIDE-F002", "TIDE-F002"]


def test_a_plan_for_single_groups_decides() -> None:
    assert verdicts(plan={"default": "stock"}) == ["TIDE-F022", "TIDE-F022"]


@pytest.mark.parametrize(
    ("members", "stated", "found"),
    [
        (range(4), "2x2", "2x2"),
        (range(8), "2x4", "2x4"),
        ([4, 5, 6, 7], "2x4", "1x4"),  # HSDP that replicates across nodes
        ([1, 5], "2x4", "2x1"),  # experts, or HSDP that replicates within nodes
        ([0, 1, 4, 5], "2x4", "2x2"),
        ([4, 5, 6, 7], "2x2", "2x2"),  # what is stated is the group's
        (range(8), "auto", "None"),
    ],
)
def test_a_group_has_its_part_of_the_topology_of_the_job(monkeypatch, members, stated, found) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(members))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4 if list(members) == [0, 1, 2, 3] else 8)
    assert str(stated_topology(TideConfig.from_any({"topology": stated}), None)) == found


@pytest.mark.parametrize(
    ("members", "stated", "words"),
    [
        ([0, 1], "3x1", "it has 3 ranks, the group 2, the job 8"),
        ([0, 1, 4], "2x4", "as many ranks on each of its nodes"),
        ([0, 4, 1, 5], "2x4", "node by node; got ranks"),
    ],
)
def test_a_topology_that_does_not_fit_a_group_is_told_why(monkeypatch, members, stated, words) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: members)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    with pytest.raises(ValueError, match=words):
        stated_topology(TideConfig.from_any({"topology": stated}), None)
