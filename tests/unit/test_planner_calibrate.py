"""The cache of calibrations: written for the user alone, read as data, and never believed beyond its facts."""

from __future__ import annotations

import copy
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.calibrate import (
    FORMAT,
    Known,
    Measured,
    Timing,
    estimate,
    fingerprint,
    folder,
    geometry,
    line,
    load,
    newest,
    parse,
    plain,
    store,
)
from tide_strategies.planner.rates import CPU_PAIR, Rates

FACTS = {"torch": "2.13", "device": "cpu"}
TABLE = {
    "a": Measured(Timing(1e-3, 2e-3), Timing(3e-3, 4e-3), 100, 50),
    "b": Measured(Timing(0.0, 0.0), Timing(1, 2), 10, 5),
}
KNOWN = Known(CPU_PAIR, TABLE)
CONTENT = json.dumps({"format": FORMAT, "facts": FACTS, **plain(KNOWN)}).encode()


def test_what_is_stored_is_loaded_and_private(tmp_path: Path) -> None:
    where = tmp_path / "x" / "y"
    assert load(where, FACTS) == (Known(), "")
    assert store(where, FACTS, KNOWN) == ""
    assert load(where, FACTS) == (KNOWN, "")
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    (file,) = where.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_other_facts_know_nothing(tmp_path: Path) -> None:
    store(tmp_path, FACTS, KNOWN)
    for changed in ({**FACTS, "torch": "2.14"}, {**FACTS, "gpu": "H200"}, {}):
        assert fingerprint(changed) != fingerprint(FACTS)
        assert load(tmp_path, changed) == (Known(), "")
    assert fingerprint(dict(reversed(FACTS.items()))) == fingerprint(FACTS)


def test_a_file_that_others_can_write_or_a_link_is_refused(tmp_path: Path) -> None:
    store(tmp_path, FACTS, KNOWN)
    (file,) = tmp_path.iterdir()
    file.chmod(0o620)
    known, words = load(tmp_path, FACTS)
    assert known == Known()
    assert "this user alone" in words
    file.chmod(0o600)
    target = tmp_path / "elsewhere"
    file.rename(target)
    file.symlink_to(target)
    known, words = load(tmp_path, FACTS)
    assert known == Known()
    assert words
    file.unlink()
    os.mkfifo(file, 0o600)
    assert load(tmp_path, FACTS)[0] == Known(), "and a pipe does not block"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert store(blocked, FACTS, KNOWN)
    assert store(blocked / "below", FACTS, KNOWN)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"[" * 10**5, b"\xff", b"9" * (2 << 20), CONTENT[:-1]])
def test_what_is_no_calibration_is_an_error_in_words(content: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse(content, FACTS)
    assert parse(CONTENT, FACTS) == KNOWN


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
        known = parse(json.dumps(data).encode(), FACTS)
    except ValueError:
        return
    assert known.rates is None or Rates.from_dict(known.rates.to_dict()) == known.rates
    for m in known.groups.values():
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


def test_the_latest_rates_of_a_kind_of_rank_are_found(tmp_path: Path) -> None:
    older, newer = replace(CPU_PAIR, name="older"), replace(CPU_PAIR, name="newer")
    for age, (facts, known) in enumerate(
        [
            ({"device": "cpu", "ranks": "3"}, Known(None, TABLE)),
            ({"device": "cuda"}, Known(replace(CPU_PAIR, name="GPU"))),
            ({"device": "cpu", "ranks": "2"}, Known(newer)),
            (FACTS, Known(older)),
        ]
    ):
        store(tmp_path, facts, known)
        os.utime(tmp_path / f"{fingerprint(facts)}.json", (1e9 - age, 1e9 - age))
    assert newest(tmp_path, "cpu") == newer
    assert newest(tmp_path, "cuda").name == "GPU"


def test_no_calibration_is_said(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="no rates of cpu ranks"):
            newest(where, "cpu")
    (tmp_path / "x.json").write_text("[" * 100_000)
    (tmp_path / "y.json").write_text('{"facts": {"device": "cpu"}}')
    with pytest.raises(ValueError, match="no rates of cpu ranks"):
        newest(tmp_path, "cpu")
