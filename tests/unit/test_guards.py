"""The guards accept the installed torch and refuse whatever differs from it, by name."""

from __future__ import annotations
import __future__

import ast
import functools
import importlib.util
import inspect
import itertools
import json
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")

from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param_group  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # noqa: E402

from tide_strategies.fsdp2 import guards  # noqa: E402

ROOT = Path(__file__).parents[2]

# Syntax whose tree has differed between Pythons.
SAMPLE = '''
@decorate(1)
async def sample(self, /, a: int, b: "list[int]" = (1, -2), *rest: str, c=None, d: float = 1.5, **more) -> dict:
    """Docstring."""
    # comment
    x: int = a
    y: list[int]
    text = f"{x!r:>{a}} and {b=} {{}}" "tail" f"{c}" u"unicode \\u00e9 \\U0001f600" f""
    with (open(x) as f, open(y) as g):
        pass
    match a:
        case {"k": [1, *others]} | None:
            yield (z := lambda q, *, r=2: q ** r)
        case str() as name if name:
            return
    def inner():
        """Docstring."""
        return x[..., 1:2, ::3], {**more}, {*rest}, b"\\x00", 1j, True, 10_000
    try:
        del x
    except (ValueError, TypeError) as e:
        raise RuntimeError("bad") from e
    else:
        print([i async for i in f if not i], {k: v for k, v in g.items()})
'''
SAMPLE_FINGERPRINT = "e06b5cf5369f84d313b45a532f539245"  # what every Python from 3.10 on must give

SIGNATURES = [
    ("self", "self"),
    ("self, async_op: bool = False", "self, async_op=False"),
    ("a, /, b, *, c: int = -1, d", "a, /, b, *, c=-1, d"),
    ("*args: int, k='x', **kw", "*args, k='x', **kw"),
    ("f=print", "f=<expression>"),
    ("p=(1, None)", "p=(1, None)"),
    ("", ""),
]


def load_tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("fingerprint_torch", ROOT / "tests/tools/fingerprint_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def print_of(source: str) -> str:
    return guards.fingerprint(ast.parse(textwrap.dedent(source)).body[0])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No override in the environment and no answer kept from another test."""
    monkeypatch.delenv(guards.ALLOW_ENV, raising=False)
    guards._check.cache_clear()
    yield
    guards._check.cache_clear()


@pytest.fixture
def unknown_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no file were byte for byte that of a release: every function is judged by its own source."""
    monkeypatch.setattr(guards, "file_hash", lambda data: "")


@pytest.fixture
def edit(tmp_path: Path) -> Callable[..., types.FunctionType]:
    """``edit(function, old, new)``: the function with a piece of its source replaced, in the same globals."""
    number = itertools.count()

    def edited(function: Any, old: str, new: str) -> types.FunctionType:
        raw = inspect.unwrap(function)
        text = textwrap.dedent(inspect.getsource(raw))
        assert old in text
        file = tmp_path / f"edited_{next(number)}.py"
        file.write_text(text.replace(old, new, 1))
        code = compile(file.read_text(), str(file), "exec", flags=__future__.annotations.compiler_flag)
        scope: dict[str, Any] = {}
        exec(code, raw.__globals__, scope)
        return scope[raw.__name__]

    return edited


def change_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(guards.FINGERPRINTS.read_text())
    changed = change(data)
    data = data if changed is None else changed
    file = tmp_path / "fingerprints.json"
    file.write_text(json.dumps(data))
    monkeypatch.setattr(guards, "FINGERPRINTS", file)


# --- the installed torch ---------------------------------------------------------------------------------------


def test_installed_torch_is_accepted():
    result = guards.check_torch()
    assert result.supported, result
    assert result.code == guards.OK
    assert result.version == torch.__version__
    assert not result.warning


def test_installed_torch_is_accepted_by_its_functions_alone(unknown_files):
    result = guards.check_torch()
    assert result.supported, result


def test_answer_is_kept(monkeypatch):
    first = guards.check_torch()
    monkeypatch.setattr(guards, "_verdict", lambda version: pytest.fail("checked twice"))
    assert guards.check_torch() is first


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "name", "old", "new"),
    [
        (FSDPParamGroup, "unshard", "is not None", "is None"),
        (FSDPParamGroup, "post_backward", "POST_BACKWARD", "PRE_BACKWARD"),
        (FSDPParamGroup, "_wait_for_post_backward", "= None", "= 0"),
        (FSDPParam, "init_unsharded_param", "storage_offset=0", "storage_offset=1"),
    ],
)
def test_one_changed_token_is_refused_by_name(monkeypatch, edit, cls, name, old, new):
    monkeypatch.setattr(cls, name, edit(getattr(cls, name), old, new))
    result = guards.check_torch()
    assert not result.supported
    assert result.code == guards.UNKNOWN_SOURCE
    assert f"{cls.__name__}.{name} differs" in result.reason
    assert torch.__version__ in result.reason
    assert "Stock FSDP2 is used" in result.remedy


def test_changed_module_function_is_refused_by_name(monkeypatch, edit):
    changed = edit(_fsdp_collectives._get_gradient_divide_factors, "pre_factor *= 2", "pre_factor *= 4")
    monkeypatch.setattr(_fsdp_collectives, "_get_gradient_divide_factors", changed)
    assert "_get_gradient_divide_factors differs" in guards.check_torch().reason


def test_changed_file_is_refused_by_the_functions_that_changed(monkeypatch, unknown_files):
    real = guards.index_source
    old, new = "self._sharded_state = ShardedState.SHARDED\n", "self._sharded_state = None\n"
    monkeypatch.setattr(guards, "index_source", lambda text: real(text.replace(old, new)))
    result = guards.check_torch()
    assert result.code == guards.UNKNOWN_SOURCE
    assert "FSDPParamGroup._to_sharded differs from every known release (and 1 more)." in result.reason  # __init__


def test_comments_docstrings_annotations_and_layout_do_not_matter(monkeypatch, edit):
    changed = edit(
        FSDPParamGroup._to_unsharded,
        "(self):\n",
        "(\n    self: 'Any',\n) -> 'None':\n    '''A docstring.'''\n    # A comment.\n    counter: int\n\n",
    )
    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", changed)
    result = guards.check_torch()
    assert result.supported, result


def test_changed_signature_is_refused_and_the_override_does_not_help(monkeypatch, edit):
    changed = edit(FSDPParamGroup.unshard, "async_op: bool = False", "async_op: bool = True")
    monkeypatch.setattr(FSDPParamGroup, "unshard", changed)
    monkeypatch.setenv(guards.ALLOW_ENV, "1")
    result = guards.check_torch()
    assert not result.supported
    assert result.code == guards.UNKNOWN_SIGNATURE
    assert "FSDPParamGroup.unshard has the signature (self, async_op=True), not (self, async_op=False)" in result.reason
    assert guards.ALLOW_ENV not in result.remedy


def test_missing_function_is_refused(monkeypatch):
    monkeypatch.delattr(FSDPParamGroup, "finalize_backward")
    result = guards.check_torch()
    assert result.code == guards.UNKNOWN_SIGNATURE
    assert "FSDPParamGroup.finalize_backward is missing" in result.reason


def test_function_that_no_longer_looks_up_the_replaced_name_is_refused(monkeypatch, edit):
    changed = edit(inspect.unwrap(FSDPParamGroup.post_backward), "foreach_reduce(", "other_reduce(")
    monkeypatch.setattr(FSDPParamGroup, "post_backward", changed)
    result = guards.check_torch()
    assert result.code == guards.UNKNOWN_SIGNATURE
    assert "FSDPParamGroup.post_backward does not look up foreach_reduce" in result.reason


def test_object_that_is_no_function_is_refused(monkeypatch):
    monkeypatch.setattr(FSDPParamGroup, "reshard", functools.partial(FSDPParamGroup.reshard))
    result = guards.check_torch()
    assert result.code == guards.UNKNOWN_SIGNATURE
    assert "FSDPParamGroup.reshard is a partial, not a Python function" in result.reason


def test_wrapper_of_another_library_is_refused(monkeypatch):
    original = FSDPParamGroup.unshard

    @functools.wraps(original)
    def traced(self: Any, async_op: bool = False) -> Any:
        return original(self, async_op)

    monkeypatch.setattr(FSDPParamGroup, "unshard", traced)
    result = guards.check_torch()
    assert result.code == guards.UNKNOWN_SOURCE
    assert "FSDPParamGroup.unshard is wrapped by code outside torch" in result.reason
    assert __file__ in result.reason


def test_function_of_another_module_is_refused(monkeypatch):
    def alloc_storage(tensor: Any) -> None: ...

    from torch.distributed.fsdp._fully_shard import _fsdp_param

    monkeypatch.setattr(_fsdp_param, "alloc_storage", alloc_storage)
    result = guards.check_torch()
    assert result.code == guards.UNKNOWN_SOURCE
    assert f"alloc_storage was replaced by code of {__name__}" in result.reason


def test_changed_state_names_are_refused(monkeypatch):
    from enum import Enum

    monkeypatch.setattr(_fsdp_common, "TrainingState", Enum("TrainingState", "FORWARD IDLE"))
    result = guards.check_torch()
    assert result.code == guards.UNKNOWN_SIGNATURE
    assert "TrainingState has the signature (class FORWARD, IDLE)" in result.reason


def test_function_without_source_is_refused_with_words(monkeypatch):
    scope: dict[str, Any] = {}
    exec("def _to_sharded(self):\n    pass\n", vars(_fsdp_param_group), scope)
    monkeypatch.setattr(FSDPParamGroup, "_to_sharded", scope["_to_sharded"])
    result = guards.check_torch()
    assert result.code == guards.UNKNOWN_SOURCE
    assert "the source of FSDPParamGroup._to_sharded is not available" in result.reason


def test_several_differences_are_counted(monkeypatch, edit):
    for name in ("_to_sharded", "_to_unsharded"):
        monkeypatch.setattr(FSDPParamGroup, name, edit(getattr(FSDPParamGroup, name), "if not", "if"))
    assert "FSDPParamGroup._to_sharded differs from every known release (and 1 more)." in guards.check_torch().reason


# --- versions and the override ---------------------------------------------------------------------------------


@pytest.fixture
def only_a_later_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The table knows one minor version, a later one, with the installed one's functions."""
    installed = "{}.{}".format(*guards.minor_of(torch.__version__))
    change_table(monkeypatch, tmp_path, lambda data: {**data, "torch": {"99.1": data["torch"][installed]}})


def test_unknown_version_is_refused(only_a_later_torch):
    result = guards.check_torch()
    assert not result.supported
    assert result.code == guards.UNKNOWN_VERSION
    assert result.reason == f"torch {torch.__version__} is not one of the known versions (99.1)."
    assert guards.ALLOW_ENV in result.remedy


def test_override_allows_an_unknown_version_with_a_warning(only_a_later_torch, monkeypatch):
    monkeypatch.setenv(guards.ALLOW_ENV, "1")
    result = guards.check_torch()
    assert result.supported
    assert result.code == guards.UNKNOWN_VERSION
    assert "not one of the known versions" in result.warning
    assert guards.ALLOW_ENV in result.warning


def test_override_does_not_allow_an_unknown_version_with_another_signature(only_a_later_torch, monkeypatch, edit):
    monkeypatch.setattr(FSDPParamGroup, "reshard", edit(FSDPParamGroup.reshard, "(self)", "(self, free)"))
    monkeypatch.setenv(guards.ALLOW_ENV, "1")
    result = guards.check_torch()
    assert not result.supported
    assert result.code == guards.UNKNOWN_SIGNATURE


def test_override_allows_an_unknown_function_with_a_warning(monkeypatch, edit):
    monkeypatch.setattr(FSDPParamGroup, "_to_sharded", edit(FSDPParamGroup._to_sharded, "if not", "if"))
    assert not guards.check_torch().supported
    monkeypatch.setenv(guards.ALLOW_ENV, "1")
    result = guards.check_torch()
    assert result.supported
    assert "FSDPParamGroup._to_sharded differs" in result.warning


@pytest.mark.parametrize("value", ["", "0", "true"])
def test_override_is_the_digit_one_alone(only_a_later_torch, monkeypatch, value):
    monkeypatch.setenv(guards.ALLOW_ENV, value)
    assert not guards.check_torch().supported


@pytest.mark.parametrize(
    ("version", "minor"),
    [("2.13.0", (2, 13)), ("2.15.1+cu132", (2, 15)), ("2.16.0.dev20261101", (2, 16)), ("2.13.0a0+git12", (2, 13))],
)
def test_minor_of(version, minor):
    assert guards.minor_of(version) == minor


# --- the table -------------------------------------------------------------------------------------------------


def without_a_function(data: dict[str, Any]) -> None:
    del next(iter(data["torch"].values()))["functions"]["_fsdp_collectives:foreach_reduce"]


def assert_table_is_named(result: guards.GuardResult) -> None:
    assert not result.supported
    assert result.code == guards.UNKNOWN_SOURCE
    assert "fingerprints.json cannot be used" in result.reason


@pytest.mark.parametrize(
    "change",
    [
        lambda data: [],
        lambda data: {**data, "format": 99},
        lambda data: {"format": guards.FORMAT},
        lambda data: {**data, "torch": {"2.13": {}}},
        lambda data: {**data, "torch": {"2.13": None}},
        lambda data: {**data, "torch": {}},
        without_a_function,
    ],
)
def test_unusable_table_is_refused(monkeypatch, tmp_path, change):
    change_table(monkeypatch, tmp_path, change)
    assert_table_is_named(guards.check_torch())


@pytest.mark.parametrize("content", ["", "{", "[1, 2", '"text"', "\x00"])
def test_broken_json_is_refused_even_with_the_override(monkeypatch, tmp_path, content):
    file = tmp_path / "fingerprints.json"
    file.write_text(content)
    monkeypatch.setattr(guards, "FINGERPRINTS", file)
    monkeypatch.setenv(guards.ALLOW_ENV, "1")
    assert_table_is_named(guards.check_torch())


def test_missing_table_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(guards, "FINGERPRINTS", tmp_path / "fingerprints.json")
    assert_table_is_named(guards.check_torch())


def test_an_error_inside_the_check_is_no_crash(monkeypatch):
    monkeypatch.setattr(guards, "_verdict", lambda version: 1 / 0)
    result = guards.check_torch()
    assert not result.supported
    assert "ZeroDivisionError" in result.reason


def test_no_known_release_lacks_a_rebound_function():
    for minor, entry in guards.load_table().items():
        for name in guards.REBOUND:
            assert None not in entry["functions"][name], minor


# --- fingerprints and signatures -------------------------------------------------------------------------------


def test_fingerprint_is_the_same_under_every_python():
    assert guards.fingerprint(ast.parse(SAMPLE).body[0]) == SAMPLE_FINGERPRINT


@pytest.mark.parametrize(
    "other",
    [
        "def other(x):\n    return x + 1",
        "def f(x):\n    '''Docstring.'''\n    return x + 1  # comment",
        "def f(x: int) -> int:\n    y: str\n    return (\n        x\n        + 1\n    )",
    ],
)
def test_fingerprint_ignores_what_has_no_effect(other):
    assert print_of(other) == print_of("def f(x):\n    return x + 1")


@pytest.mark.parametrize(
    "other",
    [
        "def f(x):\n    return x + 2",
        "def f(x):\n    return x + 1.0",
        "def f(x):\n    return x + True",
        "def f(x):\n    return x - 1",
        "def f(x):\n    return y + 1",
        "def f(x=1):\n    return x + 1",
        "def f(x, *y):\n    return x + 1",
        "@g\ndef f(x):\n    return x + 1",
        "async def f(x):\n    return x + 1",
        "def f(x):\n    'text'\n    'text'\n    return x + 1",
    ],
)
def test_fingerprint_sees_every_change(other):
    assert print_of(other) != print_of("def f(x):\n    return x + 1")


@pytest.mark.parametrize(("parameters", "text"), SIGNATURES)
def test_signature_is_the_same_from_source_and_from_the_function(parameters, text):
    source = f"def f({parameters}): ..."
    scope: dict[str, Any] = {}
    exec(source, scope)
    assert guards.signature_of_function(scope["f"]) == text
    assert load_tool().signature_of_node(ast.parse(source).body[0]) == text


# --- the tool --------------------------------------------------------------------------------------------------


def test_tool_accepts_the_installed_torch(capsys):
    assert load_tool().main(["--check"]) == 0
    assert "accepted" in capsys.readouterr().out


def test_tool_works_without_importing_torch():
    tool = str(ROOT / "tests/tools/fingerprint_torch.py")
    code = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = ['x', '--help']; runpy.run_path({tool!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tool_adds_a_release_beside_the_known_ones(tmp_path):
    tool = load_tool()
    source = tool.read_source(Path(torch.__file__).parents[1])
    name = "_fsdp_param_group:FSDPParamGroup.unshard"
    changed = {**source, "version": source["version"] + "9", "functions": dict(source["functions"])}
    changed["functions"][name] = ["self", "0" * 32]
    table = guards.load_table()
    minor = "{}.{}".format(*guards.minor_of(torch.__version__))
    before = list(table[minor]["functions"][name])
    assert tool.differences(table, changed) == [name]
    tool.merge(table, changed)
    tool.merge(table, changed)
    assert table[minor]["functions"][name] == [*before, ["self", "0" * 32]]
    assert table[minor]["versions"][-1] == changed["version"]
    file = tmp_path / "table.json"
    file.write_text(tool.dump(table))
    assert guards.load_table(file) == table
    assert not tool.differences(table, changed)


def test_shipped_table_is_as_the_tool_writes_it():
    assert load_tool().dump(guards.load_table()) == guards.FINGERPRINTS.read_text()
