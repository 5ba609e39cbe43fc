"""The cache of calibrations: written for the user alone, read as data, and never believed beyond its facts."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.calibrate import (
    Measured,
    Timing,
    estimate,
    fingerprint,
    fitted,
    folder,
    geometry,
    line,
    load,
    newest,
    parse,
    plain,
    store,
)
from tide_strategies.planner.rates import CPU_PAIR, H200_PAIR

FACTS = {"torch": "2.13", "device": "cpu"}
TABLE = {
    "a": Measured(Timing(1e-3, 2e-3), Timing(3e-3, 4e-3), 100, 50),
    "b": Measured(Timing(0.0, 0.0), Timing(1, 2), 10, 5),
}
CONTENT = json.dumps({"format": 1, "facts": FACTS, "groups": plain(TABLE)}).encode()


def test_what_is_stored_is_loaded_and_private(tmp_path: Path) -> None:
    where = tmp_path / "x" / "y"
    assert load(where, FACTS) == ({}, "")
    assert store(where, FACTS, TABLE) == ""
    assert load(where, FACTS) == (TABLE, "")
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    (file,) = where.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_other_facts_know_nothing(tmp_path: Path) -> None:
    store(tmp_path, FACTS, TABLE)
    for changed in ({**FACTS, "torch": "2.14"}, {**FACTS, "gpu": "H200"}, {}):
        assert fingerprint(changed) != fingerprint(FACTS)
        assert load(tmp_path, changed) == ({}, "")
    assert fingerprint(dict(reversed(FACTS.items()))) == fingerprint(FACTS)


def test_a_file_that_others_can_write_or_a_link_is_refused(tmp_path: Path) -> None:
    store(tmp_path, FACTS, TABLE)
    (file,) = tmp_path.iterdir()
    file.chmod(0o620)
    table, words = load(tmp_path, FACTS)
    assert table == {}
    assert "this user alone" in words
    file.chmod(0o600)
    target = tmp_path / "elsewhere"
    file.rename(target)
    file.symlink_to(target)
    table, words = load(tmp_path, FACTS)
    assert table == {}
    assert words
    file.unlink()
    os.mkfifo(file, 0o600)
    assert load(tmp_path, FACTS)[0] == {}, "and a pipe does not block"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert store(blocked, FACTS, TABLE)
    assert store(blocked / "below", FACTS, TABLE)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"[" * 10**5, b"\xff", b"9" * (2 << 20), CONTENT[:-1]])
def test_what_is_no_calibration_is_an_error_in_words(content: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse(content, FACTS)
    assert parse(CONTENT, FACTS) == TABLE


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}), st.just("1")
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside."""
    if not isinstance(data, dict):
        return [path]
    return [path, *(p for key, value in data.items() for p in places(value, (*path, key)))]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(places(json.loads(CONTENT))), values)
def test_any_value_put_anywhere_is_refused_or_harmless(path: tuple[Any, ...], value: Any) -> None:
    """Fuzzed: the result is an error in words, or a table whose every number is a sensible one."""
    data = copy.deepcopy(json.loads(CONTENT))
    if path:
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    else:
        data = value
    try:
        table = parse(json.dumps(data).encode(), FACTS)
    except ValueError:
        return
    for m in table.values():
        for t in (m.tide, m.stock):
            assert 0 <= t.all_gather_s <= 3600
            assert 0 <= t.reduce_scatter_s <= 3600
        assert type(m.shard_bytes) is int


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(content: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse(content, FACTS)


def test_geometry_tells_groups_apart() -> None:
    def key(*shapes: tuple[int, int, int], ranks: int = 2, detail: str = "") -> str:
        return geometry(GroupLayout(tuple(ParamShape(*s) for s in shapes), ranks), detail)

    keys = [key((4, 8, 2)), key((8, 4, 2)), key((4, 8, 4)), key((4, 8, 2), ranks=4), key((4, 8, 2), detail="bf16")]
    assert len(set(keys)) == len(keys)
    assert key((4, 8, 2)) == keys[0]


def test_a_size_between_others_is_on_their_line_and_one_alone_is_scaled() -> None:
    def at(size: int) -> Measured:
        return Measured(Timing(1 + size, 2 + 3 * size), Timing(size, 5), size, size)

    found = estimate({"a": at(10), "b": at(30), "c": at(100)}, 50)
    assert found is not None
    for got, want in ((found.tide, at(50).tide), (found.stock, at(50).stock)):
        assert got.all_gather_s == pytest.approx(want.all_gather_s, rel=1e-6)
        assert got.reduce_scatter_s == pytest.approx(want.reduce_scatter_s, rel=1e-6)
    assert estimate({"a": at(10)}, 20) == Measured(Timing(22, 64), Timing(20, 10), 20, 0)
    assert estimate({}, 1) is None


def test_the_gain_is_of_a_step() -> None:
    assert TABLE["a"].gain(2) == pytest.approx(2 * 2e-3 + 2e-3)


def test_a_line_needs_two_sizes() -> None:
    with pytest.raises(ValueError, match="two different sizes"):
        line([(1.0, 2.0), (1.0, 3.0)])


def test_the_folder_is_the_users_cache_unless_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder("auto") == tmp_path / "tide_strategies" / "calibration"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder("auto") == tmp_path / ".cache" / "tide_strategies" / "calibration"
    assert folder("off") is None
    assert folder("~/here") == tmp_path / "here"
    with mock.patch.object(Path, "home", side_effect=RuntimeError("no home")):
        assert folder("auto") is None


def test_rates_are_read_off_a_calibration(tmp_path: Path) -> None:
    """Times made of known rates give these rates back; what is not told stays the base's."""
    copy, sums, call = 10e9, 20e9, 1e-5
    facts = {"device": "cpu", "ranks": "4", "processors": "a CPU x 8"}

    def at(size: int) -> Measured:
        reduce = call + 3 * size / copy + (4 * size + 4 * size // 2) / sums
        return Measured(Timing(call + size / copy, reduce), Timing(1, 1), size, size // 2)

    store(tmp_path, facts, {"a": at(10**6), "b": at(10**7)})
    store(tmp_path, {**facts, "device": "cuda"}, TABLE)
    found, table = newest(tmp_path, "cpu")
    assert found == facts
    rates = fitted(found, table, CPU_PAIR)
    assert rates.local == pytest.approx(copy, rel=1e-6)
    assert rates.sum_per_cta == pytest.approx(sums, rel=1e-4)
    assert rates.call_s == pytest.approx(call, rel=1e-4)
    assert (rates.name, rates.memory) == ("calibrated, a CPU x 8", CPU_PAIR.memory)
    on_gpus = fitted({"device": "cuda", "ranks": "4", "gpu": "G x 4"}, {"a": at(10**6), "b": at(10**7)}, H200_PAIR)
    assert on_gpus.push == pytest.approx(3 * copy, rel=1e-6)
    assert on_gpus.sum_per_cta == H200_PAIR.sum_per_cta


@pytest.mark.parametrize("ranks", ["1", "0", "-2", "two", None, 3.5])
def test_rates_of_impossible_ranks_are_refused(ranks: Any) -> None:
    with pytest.raises(ValueError, match="measured on"):
        fitted({"device": "cpu", "ranks": ranks}, TABLE, CPU_PAIR)


def test_no_calibration_is_said(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="no calibration of cpu ranks"):
            newest(where, "cpu")
    (tmp_path / "x.json").write_text("[" * 100_000)
    (tmp_path / "y.json").write_text('{"facts": {"device": "cpu"}}')
    with pytest.raises(ValueError, match="no calibration of cpu ranks"):
        newest(tmp_path, "cpu")
