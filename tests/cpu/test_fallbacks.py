"""What TIDE cannot do trains as stock FSDP2 does, beside what it can, under a code that says why."""

from __future__ import annotations

import gc
import resource
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import launch
from stacks import (
    BLOCKS,
    ODD,
    Stack,
    attempt,
    codes,
    equal,
    groups_of,
    plain,
    shard,
    train,
    trained,
    warnings_of_tide,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tide_strategies import apply_tide
from tide_strategies.detect import FALLBACKS
from tide_strategies.fsdp2 import guards, handle, reduce
from tide_strategies.fsdp2.param_group import GroupBinding
from tide_strategies.runtime import bootstrap, engine
from tide_strategies.runtime.group import Tally

# --- fallbacks: groups that keep stock collectives beside groups that do not ----------------------------------


class CustomAllGather(collectives.DefaultAllGather):
    """What a user puts in the place of FSDP2's own all-gather."""


class GroupOfAnotherLibrary(FSDPParamGroup):
    """What another library turns a group into."""


class Extended(torch.Tensor):
    """A parameter that is gathered in its own way: as it is, but by an extension."""

    _data: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Extended:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self._data,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (tensor,) = outputs
        return None if out is not None else (tensor, (tensor,))

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value._data if isinstance(value, Extended) else value

        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        result = function(*args, **kwargs)
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor):
            return result
        return torch.utils._pytree.tree_map(lambda t: cls(t) if isinstance(t, torch.Tensor) else t, result)


def _odd(dtype: torch.dtype | None = None, **odd: Any) -> Callable[[], Any]:
    """A model whose odd block has another dtype, or other arguments of fully_shard."""

    def build() -> Any:
        torch.manual_seed(0)
        return shard(Stack({ODD: dtype} if dtype else None), odd)

    return build


def _custom() -> Any:
    model = plain()
    model.blocks[ODD].set_custom_all_gather(CustomAllGather())
    return model


def _custom_on_one_rank() -> Any:
    return _custom() if dist.get_rank() == 1 else plain()


def _by_columns() -> Any:
    return _odd(shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)()


def _extension() -> Any:
    torch.manual_seed(0)
    model = Stack()
    model.blocks[ODD].up.weight = nn.Parameter(Extended(model.blocks[ODD].up.weight.detach()))
    return shard(model)


def _another_class() -> Any:
    model = plain()
    groups_of(model.blocks[ODD])[0].__class__ = GroupOfAnotherLibrary
    return model


def _replicated() -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    torch.manual_seed(0)
    model = Stack()
    world = dist.get_world_size()
    replicate(model.blocks[ODD], mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",)))
    return shard_rest(model)


def shard_rest(model: Any, **kwargs: Any) -> Any:
    """As :func:`shard`, but the odd block is left as it is."""
    kwargs.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for i, block in enumerate(model.blocks):
        if i != ODD:
            fully_shard(block, **kwargs)
    return fully_shard(model, ignored_params=set(model.blocks[ODD].parameters()), **kwargs)


HALF, FULL, DOUBLE = torch.float16, torch.float32, torch.float64
#: Case -> (code of the odd block, words of its reason, how to build the model).
TWO_RANKS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "replicated": ("TIDE-F001", "replicated", _replicated),
    "custom collectives": ("TIDE-F002", "CustomAllGather", _custom),
    "columns": ("TIDE-F003", "up.weight' is sharded on dimension 1", _by_columns),
    "extension": ("TIDE-F004", "up.weight' has an all-gather extension", _extension),
    "offload": ("TIDE-F005", "offloaded", _odd(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "half": ("TIDE-F006", "dtype torch.float16", _odd(HALF)),
    "double": ("TIDE-F006", "dtype torch.float64", _odd(DOUBLE)),
    "cast to half": ("TIDE-F013", "torch.float32 to torch.float16", _odd(mp_policy=MixedPrecisionPolicy(HALF, FULL))),
    "reduce in half": ("TIDE-F014", "torch.float16", _odd(mp_policy=MixedPrecisionPolicy(None, HALF))),
    "another class": ("TIDE-F015", "GroupOfAnotherLibrary", _another_class),
    "one rank cannot": ("TIDE-F025", "rank 1 has TIDE-F002", _custom_on_one_rank),
}


def _compare(build: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """Train a case as stock and through TIDE."""
    want = trained(build())
    model = build()
    with warnings_of_tide() as warned:
        tide = apply_tide(model, {"timeout_s": 30, **options})
        got = trained(model)
    report = tide.report()
    tide.close()
    gc.collect()
    pairs = zip([torch.tensor(got[0]), *got[1]], [torch.tensor(want[0]), *want[1]], strict=True)
    return {
        "equal": equal(got, want),
        "difference": max((a.double() - b.double()).abs().max().item() for a, b in pairs if a.numel()),
        "codes": codes(report),
        "reasons": {g.name: g.reason for g in report.groups},
        "paths": {g.name: g.path for g in report.groups},
        "remedies": {g.name: g.remedy for g in report.groups},
        "calls": {g.name: (g.all_gather.calls, g.reduce_scatter.calls) for g in report.groups},
        "warned": warned,
        "text": str(report),
    }


def _mixed(rank: int, world: int, cases: dict[str, tuple[str, str, Callable[[], Any]]]) -> dict[str, Any]:
    out = {}
    for name, (_, _, build) in cases.items():
        out[name] = _compare(build)
    return out


def _run_two(rank: int, world: int, _: Any) -> dict[str, Any]:
    return _mixed(rank, world, TWO_RANKS)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return launch(2, _run_two, timeout=150)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_group_that_cannot_falls_back_beside_groups_that_can(two_ranks: list[dict[str, Any]], name: str) -> None:
    _check_mixed([r[name] for r in two_ranks], *TWO_RANKS[name][:2])
    assert all(r[name]["equal"] for r in two_ranks)


def _check_mixed(results: list[dict[str, Any]], code: str, words: str, groups: int = BLOCKS + 1) -> None:
    odd = f"blocks.{ODD}"
    for rank, result in enumerate(results):
        others = {n: c for n, c in result["codes"].items() if n != odd}
        assert set(others.values()) == {"TIDE-OK"}
        assert len(others) == BLOCKS
        # The rank that cannot has its own code; the other one refers to it.
        expected, said = ("TIDE-F002", "CustomAllGather") if code == "TIDE-F025" and rank == 1 else (code, words)
        assert result["codes"][odd] == expected
        assert said in result["reasons"][odd]
        assert result["remedies"][odd]
        assert result["paths"] == {n: "stock" if n == odd else "tide" for n in result["codes"]}
        assert expected in result["text"]
        # Rank 0 warns once, in the words of the report.
        assert len(result["warned"]) == (rank == 0)
        if rank == 0:
            assert f"{groups - BLOCKS} of {groups} groups use stock collectives" in result["warned"][0]
            assert expected in result["warned"][0]
            assert said in result["warned"][0]
        assert all(result["calls"][n][0] > 0 and result["calls"][n][1] == 3 for n in others)


def _shrunk_mesh() -> Any:
    return _odd(reshard_after_forward=2)()


def _tensor_parallel() -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Stack()
    for name in ("up", "down"):
        linear = getattr(model.blocks[ODD], name)
        placement = Shard(0) if name == "up" else Shard(1)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [placement]))
    block = model.blocks[ODD]
    block.up.bias = nn.Parameter(distribute_tensor(block.up.bias.detach(), mesh["tp"], [Shard(0)]))
    block.forward = types.MethodType(_parallel_forward, block)
    return shard(model, mesh=mesh["dp"])


def _parallel_forward(block: Any, x: torch.Tensor) -> torch.Tensor:
    """A block whose hidden layer is split over the tensor-parallel ranks."""
    mesh = block.up.weight.device_mesh
    y = block.up(DTensor.from_local(block.norm(x), mesh, run_check=False))
    return x + block.scale * block.down(torch.relu(y)).full_tensor()


def _several_meshes() -> Any:
    other = common.FSDPMeshInfo(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], shard_mesh_dim=0)

    def place(p: torch.Tensor) -> Any:
        return common.ShardPlacementResult(Shard(0), other) if p.ndim == 2 else None

    return _odd(shard_placement_fn=place)()


#: The same with four ranks, where the mesh needs them.
FOUR_RANKS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "shrunk mesh": ("TIDE-F007", "smaller mesh", _shrunk_mesh),
    "tensor parallel": ("TIDE-F012", "up.weight' is a DTensor", _tensor_parallel),
}
if hasattr(common, "ShardPlacementResult"):  # from torch 2.12 on; before, a module has but one mesh
    FOUR_RANKS["several meshes"] = ("TIDE-F008", "several parameter groups", _several_meshes)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return launch(4, _mixed, FOUR_RANKS, timeout=150)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_a_group_on_a_mesh_of_its_own_falls_back(four_ranks: list[dict[str, Any]], name: str) -> None:
    results = [r[name] for r in four_ranks]
    _check_mixed(results, *FOUR_RANKS[name][:2], groups=5 if name == "several meshes" else 4)
    # Four fp32 addends in another order: a gradient differs by at most 6 * 2^-24 of the largest addend (below 1). SGD
    # with momentum moves a parameter by at most 0.05 * (1 + 1.9 + 2.71) of that, which the model may amplify a little.
    assert max(r["difference"] for r in results) < 1e-5


# --- fallbacks of the whole job -------------------------------------------------------------------------------

SUPPORTED = guards.GuardResult(True, torch.__version__, guards.OK)
UNKNOWN = guards.GuardResult(False, "9.9", guards.UNKNOWN_VERSION, "torch 9.9 is not known.", "Install another.")


@contextmanager
def file_size_limit(nbytes: int, here: bool) -> Iterator[None]:
    """No file of this process, memory files included, may grow beyond ``nbytes``; on one rank alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _strictly(build: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """Under strict: the error, and that the model trains on as stock all the same."""
    want = trained(build())
    model = build()

    def apply_and_train() -> None:
        apply_tide(model, {"timeout_s": 30, "strict": True, **options})
        train(model, 1)

    kind, words, seconds = attempt(apply_and_train)
    return {"kind": kind, "words": words, "seconds": seconds, "equal": equal(trained(model), want)}


@contextmanager
def refused(what: str, from_call: int, here: bool) -> Iterator[None]:
    """From the given call on, the operating system refuses this process mappings of one kind; on one rank alone."""
    real, calls = getattr(engine._native, what), 0

    def limited(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if here and calls >= from_call:
            raise OSError(12, "Cannot allocate memory")
        return real(*args)

    with mock.patch.object(engine._native, what, limited):
        yield


def _job(rank: int, world: int, _: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    elsewhere = {"boot_id": "another", "hostname": "elsewhere"} if rank == 1 else {}
    with mock.patch.object(bootstrap, "host_identity", return_value={**bootstrap.host_identity(), **elsewhere}):
        out["another host"] = _compare(plain, rail="local")
        out["another host, rails"] = _compare(plain, strict=True)
        out["another host, rails for GPUs"] = _compare(plain, rail="nccl_rma")
    with file_size_limit(1 << 14, rank == 0):
        out["no room"] = _compare(plain)
        out["no room, strict"] = _strictly(plain)
    with refused("Mapping", 1, rank == 1):
        out["no mapping"] = _compare(plain)
    with refused("Window", 3, rank == 1):
        out["no address space"] = _compare(plain)
        out["no address space, strict"] = _strictly(plain)
    out["custom, strict"] = _strictly(_custom)
    out["custom on one rank, strict"] = _strictly(_custom_on_one_rank)
    out["stock"] = _compare(plain, plan="stock", strict=True)
    out["nodes"] = _compare(plain, topology="2x1")
    out["more ranks"] = _compare(plain, topology="1x4")
    out["right topology"] = _compare(plain, topology="1x2", strict=True)
    with mock.patch.object(handle, "check_torch", return_value=UNKNOWN):
        out["torch"] = _compare(plain)
        out["torch, strict"] = _strictly(plain)
    with mock.patch.object(handle, "check_torch", return_value=SUPPORTED):
        out["known torch"] = _compare(plain, strict=True)

    def frozen_half() -> Any:
        torch.manual_seed(0)
        model = Stack({ODD: HALF})
        model.blocks[ODD].requires_grad_(False)
        return shard(model)

    out["frozen half"] = _compare(frozen_half, strict=True)

    # More memory is needed later than was there at installation: an error on both ranks, not a hang.
    model = plain()
    tide = apply_tide(model, {"timeout_s": 20, "strict": True, "all_gather.slots": 1})
    train(model, 1)
    with file_size_limit(1, rank == 0):
        out["no room later"] = attempt(lambda: [block.unshard() for block in model.blocks])
    tide.close()
    return out


@pytest.fixture(scope="module")
def job() -> list[dict[str, Any]]:
    return launch(2, _job, timeout=150)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("another host", "TIDE-F020", "ranks 0 and 1 cannot share memory: they run on different hosts"),
        ("another host, rails for GPUs", "TIDE-F028", "nccl_rma is for GPU ranks"),
        ("no room", "TIDE-F021", "rank 0: "),
        ("no mapping", "TIDE-F021", "rank 1: OSError: [Errno 12] Cannot allocate memory"),
        ("no address space", "TIDE-F021", "rank 1: OSError: [Errno 12] Cannot allocate memory"),
        ("more ranks", "TIDE-F024", "topology 1x4 does not fit the group: it has 4 ranks, the group 2"),
        ("stock", "TIDE-F022", "plan: stock"),
    ],
)
def test_what_concerns_the_job_makes_every_group_stock(
    job: list[dict[str, Any]], name: str, code: str, words: str
) -> None:
    for rank, results in enumerate(job):
        result = results[name]
        assert result["equal"]
        assert set(result["codes"].values()) == {code}
        assert set(result["paths"].values()) == {"stock"}
        assert all(words in reason for reason in result["reasons"].values()), result["reasons"]
        assert result["text"].startswith("TIDE: 0 of 4 groups accelerated")
        assert "shared memory of this node" not in result["text"]
        # Stock groups are measured all the same.
        assert all(gathers > 0 and reductions == 3 for gathers, reductions in result["calls"].values())
        assert len(result["warned"]) == (rank == 0 and name != "stock")


def test_the_shortage_of_memory_is_told_in_bytes(job: list[dict[str, Any]]) -> None:
    for result in job:
        reason = next(iter(result["no room"]["reasons"].values()))
        assert "bytes are needed for" in reason
        assert "are available" in reason


@pytest.mark.parametrize("name", ["right topology", "nodes", "another host, rails", "known torch", "frozen half"])
def test_what_is_no_fallback_passes_strictly(job: list[dict[str, Any]], name: str) -> None:
    for result in job:
        assert result[name]["equal"]
        assert set(result[name]["codes"].values()) == {"TIDE-OK"}
        assert result[name]["warned"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no room, strict", "4 of 4 groups fall back. (root): TIDE-F021"),
        ("no address space, strict", "4 of 4 groups fall back. (root): TIDE-F021"),
        ("custom, strict", f"1 of 4 groups fall back. blocks.{ODD}: TIDE-F002"),
        ("custom on one rank, strict", f"1 of 4 groups fall back. blocks.{ODD}: TIDE-F0"),
        ("torch, strict", "TIDE-F101 torch 9.9 is not known."),
    ],
)
def test_strict_makes_a_fallback_an_error_on_every_rank(job: list[dict[str, Any]], name: str, words: str) -> None:
    for result in job:
        assert result[name]["kind"] == "TideFallbackError"
        assert words in result[name]["words"]
        assert result[name]["seconds"] < 10
        assert result[name]["equal"], "what could not be accelerated is left as it was"


def test_unsupported_torch_keeps_stock_with_one_warning(job: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(job):
        result = results["torch"]
        assert result["equal"]
        assert result["codes"] == {}
        assert result["text"].startswith("TIDE: stock FSDP2: TIDE-F101 torch 9.9 is not known.")
        assert "Install another." in result["text"]
        assert len(result["warned"]) == (rank == 0)
        assert all("TIDE-F101" in w for w in result["warned"])


def test_a_shortage_of_memory_after_installation_stops_every_rank(job: list[dict[str, Any]]) -> None:
    for result in job:
        kind, words, seconds = result["no room later"]
        assert kind == "TideArenaError"
        assert "rank 0" in words
        assert "bytes are needed for 'ring'" in words
        assert seconds < 10


# --- single calls that run as stock ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "reduce_dtype", "code"),
    [
        ([torch.float32, torch.bfloat16], torch.float32, "TIDE-F030"),
        ([torch.float16], None, "TIDE-F031"),
        ([torch.float64, torch.float64], torch.float32, "TIDE-F031"),
        ([torch.float32], torch.float16, "TIDE-F014"),
    ],
)
def test_a_call_that_cannot_runs_as_stock_and_is_counted(
    dtypes: list[torch.dtype], reduce_dtype: torch.dtype | None, code: str
) -> None:
    """Through the function that FSDP2's post_backward calls, with a group whose own collectives must stay untouched."""
    tallies = types.SimpleNamespace(all_gathers=Tally(), reduce_scatters=Tally())
    group = GroupBinding(types.SimpleNamespace(collectives=tallies))  # with nothing that could be called
    params = [types.SimpleNamespace(_tide_group=group, _tide_index=i, _param_fqn=f"p{i}") for i in range(len(dtypes))]
    gradients = [torch.ones(2, dtype=d) for d in dtypes]
    names = [n for n in reduce._signature.parameters if n not in ("fsdp_params", "unsharded_grads", "reduce_dtype")]
    others = dict.fromkeys(names)
    with mock.patch.object(reduce, "_torch_foreach_reduce", return_value="stock") as stock:
        result = reduce.dispatch(fsdp_params=params, unsharded_grads=gradients, reduce_dtype=reduce_dtype, **others)
    assert result == "stock"
    assert stock.call_args.kwargs["unsharded_grads"] is gradients
    assert (group.reduce_scatters.calls, group.reduce_scatters.stock_calls) == (1, 1)
    assert group.reduce_scatters.stock_reason.startswith(f"{code} {FALLBACKS[code][0].split('{}')[0]}")


def test_every_code_that_a_cpu_can_provoke_is_provoked_here() -> None:
    provoked = {code for code, *_ in [*TWO_RANKS.values(), *FOUR_RANKS.values()]}
    provoked |= {"TIDE-F010", "TIDE-F014", "TIDE-F030", "TIDE-F031", "TIDE-F101"}
    provoked |= {"TIDE-F020", "TIDE-F021", "TIDE-F022", "TIDE-F024", "TIDE-F028"}
    provoked |= {"TIDE-F026", "TIDE-F027"}  # test_calibration.py; test_rails.py, which has hosts
    # tests/unit/test_eligibility.py has F009, F011 (FSDP2 makes no group without parameters) and F016 to F018;
    # tests/unit/test_rail_parts.py has F023; F102 and F103 are the guards' own (tests/unit/test_guards.py) and take
    # the path that F101 takes here; F029 and F032 are of rails between GPUs (tests/unit/test_native_nccl.py,
    # tests/unit/test_connect_gpu.py).
    elsewhere = ("F009", "F011", "F016", "F017", "F018", "F023", "F029", "F032", "F102", "F103")
    if "several meshes" not in FOUR_RANKS:
        provoked.add("TIDE-F008")
    assert FALLBACKS.keys() - provoked == {f"TIDE-{code}" for code in elsewhere}
