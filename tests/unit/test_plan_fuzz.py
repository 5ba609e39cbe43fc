"""``tide plan`` on any model config and any rates: a plan, or words and exit code 1, and soon."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tide_strategies.cli.main import main
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner import architectures, limits
from tide_strategies.planner.predict import NODES_CHUNK_BYTES, group_times
from tide_strategies.planner.rates import CPU_PAIR, H200_PAIR, PAPER, Rates, bounds
from tide_strategies.topology import Topology

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
#: Far beyond what any of these takes, even on a busy machine; without bounds they take for ever.
_MOST_S = 60


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """Fail what takes longer than :data:`_MOST_S`."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no plan within {_MOST_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def plan(where: Path, config: Any, rates: Any, *words: str) -> tuple[int, str]:
    """Exit code, and the plan (0) or what was wrong (1)."""
    (where / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if rates is not None:
        (where / "rates.json").write_text(json.dumps(rates))
        words = (*words, "--rates", str(where / "rates.json"))
    out, err = io.StringIO(), io.StringIO()
    with soon(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", str(where), *words, "--json"])
    if code == 0:
        found = json.loads(out.getvalue())
        assert all(0 < k[t] < 1e300 for k in found["groups"] for t in ("all_gather_s", "reduce_scatter_s"))
    return code, out.getvalue() if code == 0 else err.getvalue()


@pytest.mark.parametrize(
    ("config", "words", "says"),
    [
        ({"hidden_size": 10**6, "intermediate_size": 10**6}, (), "group 'model.layers.0' has 9 parameters of"),
        ({"hidden_size": 10**7, "vocab_size": 10**6}, (), "group 'embed_tokens' has 1 parameters of"),
        ({"hidden_size": 10**7}, ("--gpus", "1"), "copies a rank, by chunks of"),
        ({"hidden_size": 10**6, "intermediate_size": 10**6}, ("--device", "cpu"), "by chunks of 524288 bytes"),
        ({"hidden_size": 10**6, "intermediate_size": 10**6}, ("--topology", "64x8"), "64x8 ranks would exchange in"),
        ({}, ("--gpus", "1000000"), "at most 512 nodes with 72 ranks each are planned; got 1x1000000"),
        ({}, ("--topology", "999999999x1"), "are planned; got 999999999x1"),
        ({"model_type": [[["x"] * 99] * 99] * 9}, (), "model_type [[['x', 'x', 'x', 'x', 'x', 'x', ...]"),
        ({"model_type": "mixtral", "mlp_only_layers": [[]]}, (), "mlp_only_layers must list numbers of layers"),
    ],
)
def test_sizes_that_no_model_has_are_refused_in_words(tmp_path: Path, config: Any, words: Any, says: str) -> None:
    code, err = plan(tmp_path, {**CONFIG, **config}, None, *words)
    assert code == 1
    assert says in err
    assert len(err) < 600


def test_chunks_that_are_many_are_refused_or_timed_by_a_part(tmp_path: Path) -> None:
    large = {**CONFIG, "hidden_size": 8192, "intermediate_size": 28672}
    code, err = plan(tmp_path, large, {**H200_PAIR.to_dict(), "chunk_cap": 4096})
    assert code == 1
    assert (
        "by chunks of 4096 bytes; at most 131072 are planned. Check the model's sizes and the rates' chunk_cap" in err
    )
    code, out = plan(tmp_path, large, {**H200_PAIR.to_dict(), "chunk_cap": 1 << 19})
    assert code == 0
    assert [g["method"] for g in json.loads(out)["groups"]] == ["replay", "replay of a part", "replay"]


@pytest.mark.parametrize(("rates", "cpu"), [(CPU_PAIR, True), (H200_PAIR, False)])
def test_the_time_by_a_part_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, rates: Rates, cpu: bool) -> None:
    """Two parts and a line through their times: chunks follow each other at a steady pace."""
    shapes = (ParamShape(4001, 4096, 2), ParamShape(1, 1 << 22, 2), ParamShape(300, 1, 2))
    group, topology = GroupLayout(shapes, 4), Topology(1, 4)
    whole = group_times(rates, group, topology, one_memory=cpu, chunk_bytes=1 << 16)
    monkeypatch.setattr("tide_strategies.planner.predict.MOST_REPLAYED_COPIES", 1024)
    part = group_times(rates, group, topology, one_memory=cpu, chunk_bytes=1 << 16)
    assert (whole.method, part.method) == ("replay", "replay of a part")
    assert part.all_gather_s == whole.all_gather_s
    assert part.reduce_scatter_s == pytest.approx(whole.reduce_scatter_s, rel=0.02)


@pytest.mark.parametrize("place", ["pipe", "zeros", "folder"])
def test_what_is_no_file_of_that_size_is_not_read(tmp_path: Path, place: str) -> None:
    file, err = tmp_path / "config.json", io.StringIO()
    if place == "pipe":
        os.mkfifo(file)
    elif place == "zeros":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
        (tmp_path / "config.json" / "config.json").mkdir()
    for arguments in (["plan", str(file)], ["plan", "wan2.2-14b", "--rates", str(file)]):
        with soon(), contextlib.redirect_stderr(err):
            assert main(arguments) == 1
    words = "IsADirectoryError" if place == "folder" else "no regular file, or one of more than 16777216 bytes"
    assert err.getvalue().count(f"{file}: {words}") + err.getvalue().count(f"{file / 'config.json'}: {words}") == 2


_LIMITS = {f.name: bounds(f.name)[:2] for f in fields(Rates) if f.name not in ("name", "multicast")}


def test_rates_at_their_bounds_all_together_make_a_plan(tmp_path: Path) -> None:
    for at in (0, 1):
        for base in (PAPER, CPU_PAIR):
            rates = replace(base, **{name: both[at] for name, both in _LIMITS.items()}).to_dict()
            for words in (("--gpus", "2"), ("--topology", "2x2"), ("--device", "cpu", "--gpus", "3")):
                assert plan(tmp_path, CONFIG, rates, *words)[0] == 0


@pytest.mark.parametrize("name", _LIMITS)
def test_rates_beyond_a_bound_are_named(tmp_path: Path, name: str) -> None:
    low, high = _LIMITS[name]
    for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), 5e-324 if low else -5e-324, 1e300):
        code, err = plan(tmp_path, CONFIG, {**PAPER.to_dict(), name: value})
        assert code == 1
        assert f"rate '{name}' must be a number from {low:g} to {high:g}" in err


_BEYOND = st.sampled_from([5e-324, 1e-300, 1e300, -1.0, 0.5, 0, None, "1", [1], True, 10**40])
_RATES = st.fixed_dictionaries(
    {}, optional={n: st.one_of(st.sampled_from(both), st.floats(*both)) for n, both in _LIMITS.items()}
)
_ATTENTION = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
_NAMES = (*_ATTENTION, *_EXPERTS, "intermediate_size")
_SIZES = st.fixed_dictionaries(
    {"model_type": st.sampled_from(["llama", "qwen2", "mixtral", "qwen3_moe"])},
    optional=dict.fromkeys(_NAMES, st.integers(1, 300)),
)
_HOSTILE = st.sampled_from([10**8, 0, -1, 1.5, None, "8", [], {}, 10**30])
#: Nothing, or something that is no size or rate in one place.
_SIZE_BEYOND = st.one_of(
    st.just({}), st.dictionaries(st.sampled_from([*_NAMES, "model_type", "mlp_only_layers"]), _HOSTILE, max_size=1)
)
_RATE_BEYOND = st.one_of(st.just({}), st.dictionaries(st.sampled_from([*_LIMITS]), _BEYOND, max_size=1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.builds(dict.__or__, _SIZES, _SIZE_BEYOND),
    st.builds(dict.__or__, _RATES, _RATE_BEYOND),
    st.sampled_from(["1x2", "1x3", "2x2", "4x1", "9x8", "1x1"]),
    st.sampled_from(["cpu", "cuda"]),
)
def test_whatever_the_files_say_there_is_a_plan_or_words(tmp_path: Path, sizes, rates, topology, device) -> None:
    words = ("--topology", topology, "--device", device)
    code, said = plan(tmp_path, {**CONFIG, **sizes}, {**PAPER.to_dict(), **rates}, *words)
    assert code == 0 or said.splitlines()[-1].startswith("tide plan: ")


def test_bounds_are_above_what_the_presets_and_papers_jobs_need() -> None:
    """In chunks as small as GPUs take (8 MiB), on a node, on the largest NVLink domain, and on 1,024 GPUs."""
    for name in ("llama-3.1-70b", "qwen3-30b-a3b", "wan2.2-14b"):
        for topology in (Topology(1, 8), Topology(1, 72), Topology(128, 8)):
            limits.check_topology(topology)
            limits.check_model(architectures.preset(name), topology, 8 << 20)
        layouts = [g.layout(64) for g in architectures.preset(name).groups]
        work = max(64 * limits.copies(x, Topology(8, 8), NODES_CHUNK_BYTES) for x in layouts)
        assert work <= limits.MOST_REPLAYED_ACROSS, "64 GPUs are replayed"
