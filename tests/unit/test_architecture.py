"""The arrows between the parts, and what no part may do: read from the source, and from fresh interpreters."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tide_strategies.detect import FALLBACKS, OK

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tide_strategies"
NAME = "tide_strategies"
#: Folders that are installed inside the package, and under which name there.
INSTALLED = {PACKAGE: ".", ROOT / "kernels": "kernels", ROOT / "configs": "configs"}

#: Parts from the ground up. A part may import parts of lower layers and itself, nothing else of the package.
LAYERS: list[set[str]] = [
    {"errors", "configs"},
    {"config", "detect", "report", "layout", "topology"},
    {"collectives", "_native", "kernels"},
    {"verify", "planner", "runtime", "metrics"},
    {"fsdp2"},
    {"integrations"},
    {"cli", "launch"},
]
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}
#: The package's own front (names that resolve on first use) and its entry point; they import parts by name, late.
FRONT = {"__init__", "_autoload"}
TORCH_FREE = {
    "errors",
    "config",
    "detect",
    "report",
    "layout",
    "topology",
    "collectives",
    "verify",
    "planner",
    "metrics",
}

MAX_LINES = 450
NONDESCRIPT = {"utils", "util", "helpers", "helper", "common", "misc"}

#: Where a private name of torch.distributed may be used outside fsdp2, and why.
PRIVATE_TORCH_OUTSIDE = {
    # torch keeps the list of all process groups nowhere else; the teardown never raises if it is not there.
    ("runtime/teardown.py", "torch.distributed.distributed_c10d._world"),
}
#: Private attributes of FSDP2's objects, whose meaning only fsdp2 (behind the guards) may rely on.
PRIVATE_FSDP2 = re.compile(
    r"_get_fsdp_state|_fsdp_param_groups?|_fsdp_params?|_lazy_init|_sharded_param_data|_sharded_local_tensor|"
    r"_unsharded_param|_module_fqn|_param_fqn|_training_state|_all_gather_result|_orig_size|_reshard_after_forward"
)

UNPICKLING = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
#: Lightning's own checkpoint files are read with torch.load, as Lightning does; nothing there comes from a peer.
MAY_NAME_PICKLE = {"integrations/lightning/checkpoint.py"}
#: Collectives of torch that pickle what they carry.
OBJECT_COLLECTIVE = re.compile(r"(all_)?gather_object|(broadcast|scatter|send|recv)_object_list")


def sources() -> list[Path]:
    return sorted(p for folder in INSTALLED for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def inside(path: Path) -> PurePosixPath:
    """Where a source is once installed, in the package."""
    folder = next(f for f in INSTALLED if path.is_relative_to(f))
    return PurePosixPath(INSTALLED[folder], path.relative_to(folder))


def relative(path: Path) -> str:
    return inside(path).as_posix()


def own_part(path: Path) -> str:
    """The part that a source belongs to."""
    return inside(path).parts[0].removesuffix(".py")


def part_of(module: str) -> str:
    """``runtime`` of ``tide_strategies.runtime.group``; empty for the package itself."""
    return [*module.split("."), ""][1]


def imports(
    tree: ast.AST, package: str = NAME, skip: frozenset[ast.AST] = frozenset()
) -> Iterator[tuple[str, list[str]]]:
    """Every import of a module with the names taken from it, wherever it stands; ``package`` resolves dots."""
    for node in ast.walk(tree):
        if node in skip:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base, [alias.name for alias in node.names]


def only_for_types(tree: ast.AST) -> frozenset[ast.AST]:
    """Nodes under ``if TYPE_CHECKING``, which never run."""
    return frozenset(
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    )


def imported_parts(path: Path, text: str) -> set[str]:
    """Parts of this package that a source imports."""
    package = ".".join([NAME, *inside(path).parts[:-1]])
    found = set()
    for module, names in imports(ast.parse(text), package):
        if module == NAME:
            found |= {n for n in names if n in LAYER}
        elif module.startswith(f"{NAME}."):
            found.add(part_of(module))
    return found


def forbidden_parts(path: Path, text: str) -> set[str]:
    """Parts that a source imports and must not."""
    own = own_part(path)
    allowed = {own, *(part for part, level in LAYER.items() if level < LAYER[own])} | FRONT
    return imported_parts(path, text) - allowed


def test_every_part_has_its_layer() -> None:
    parts = {own_part(p) for p in sources()} - FRONT
    assert parts <= LAYER.keys()


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_arrows_run_one_way(path: Path) -> None:
    if path.stem in FRONT and path.parent == PACKAGE:
        tree = ast.parse(path.read_text())
        now = {m for m, _ in imports(tree, skip=only_for_types(tree)) if m.startswith(f"{NAME}.")}
        assert now == set(), "the front imports parts on first use only"
        return
    assert forbidden_parts(path, path.read_text()) == set()


@pytest.mark.parametrize(
    ("where", "line", "found"),
    [
        ("runtime/x.py", "from tide_strategies.fsdp2 import access", {"fsdp2"}),
        ("runtime/x.py", "from tide_strategies import fsdp2, _native", {"fsdp2"}),
        ("runtime/x.py", "def f():\n    import tide_strategies.integrations.summary as s", {"integrations"}),
        ("fsdp2/x.py", "from ..integrations import summary", {"integrations"}),
        ("fsdp2/x.py", "from . import access", set()),
        ("collectives/x.py", "from tide_strategies.runtime.group import Tally", {"runtime"}),
        ("layout.py", "from tide_strategies.topology import Topology", {"topology"}),
        ("verify/x.py", "from tide_strategies.runtime import encode", {"runtime"}),
        ("integrations/x.py", "from tide_strategies.fsdp2.handle import TideHandle", set()),
    ],
)
def test_a_forbidden_arrow_would_be_seen(where: str, line: str, found: set[str]) -> None:
    assert forbidden_parts(PACKAGE / where, line) == found


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torch_free_modules() -> list[str]:
    out = []
    for path in sources():
        parts = inside(path).with_suffix("").parts
        if parts[0] in TORCH_FREE:
            out.append(".".join([NAME, *(p for p in parts if p != "__init__")]))
    return out


def test_torch_free_parts_name_no_torch() -> None:
    modules = torch_free_modules()
    assert len(modules) >= 10
    for path in sources():
        if own_part(path) in TORCH_FREE:
            roots = {m.split(".")[0] for m, _ in imports(ast.parse(path.read_text()))}
            assert not roots & {"torch", "lightning", "accelerate", "numpy"}, relative(path)


def test_torch_free_parts_leave_torch_out_of_the_process() -> None:
    """Each in the same fresh interpreter, in an order in which the first culprit is named."""
    code = f"""
import importlib, sys
for name in {torch_free_modules()!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
print("done")
"""
    assert run(code).strip() == "done"


def test_importing_the_package_imports_neither_torch_nor_its_own_parts() -> None:
    code = """
import sys
import tide_strategies
assert "torch" not in sys.modules
print(sorted(m for m in sys.modules if m.startswith("tide_strategies.")))
assert "TideConfig" in dir(tide_strategies)
tide_strategies.TideConfig(), tide_strategies.TideError, tide_strategies.TideReport
assert "torch" not in sys.modules
"""
    assert run(code).strip() == "['tide_strategies._autoload']"


def test_every_public_name_resolves() -> None:
    code = """
import tide_strategies
for name in tide_strategies.__all__:
    if name not in ("TideFSDPStrategy", "TideFSDPPlugin"):  # need Lightning, Accelerate
        getattr(tide_strategies, name)
"""
    run(code)


# --- private torch --------------------------------------------------------------------------------------------


def torch_names(tree: ast.AST) -> Iterator[str]:
    """Dotted torch names that a source imports or reaches through an imported torch name."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield alias.name
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            # name = sys.modules.get("torch.distributed"), or import_module of it
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            for text in ast.walk(node.value):
                if (
                    isinstance(text, ast.Constant)
                    and str(text.value).startswith("torch.")
                    and isinstance(target, ast.Name)
                ):
                    aliases[target.id] = str(text.value)
    # A parameter keeps the name of what it is given: good enough for the few places that pass a module on.
    for node in ast.walk(tree):
        chain: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            chain.insert(0, inner.attr)
            inner = inner.value
        if chain and isinstance(inner, ast.Name) and inner.id in aliases:
            yield ".".join([aliases[inner.id], *chain])


def private_distributed(name: str) -> str | None:
    """The private part of a name of torch.distributed, up to its first underscore part; None if it is public."""
    parts = name.split(".")
    if parts[:2] != ["torch", "distributed"]:
        return None
    for i, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[: i + 1])
    return None


def private_uses(text: str) -> set[str]:
    return {found for name in torch_names(ast.parse(text)) if (found := private_distributed(name)) is not None}


def test_private_torch_distributed_is_touched_in_fsdp2_alone() -> None:
    outside, inside = set(), set()
    for path in sources():
        uses = private_uses(path.read_text())
        if path.is_relative_to(PACKAGE / "fsdp2"):
            inside |= uses
        else:
            outside |= {(relative(path), use) for use in uses}
    assert outside == PRIVATE_TORCH_OUTSIDE
    assert "torch.distributed.fsdp._fully_shard" in inside, "the check sees what it looks for"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from torch.distributed.fsdp._fully_shard import FSDPModule", {"torch.distributed.fsdp._fully_shard"}),
        ("import torch.distributed._tensor as t", {"torch.distributed._tensor"}),
        ("import torch\ntorch.distributed.fsdp._x.y()", {"torch.distributed.fsdp._x"}),
        ("import torch.distributed as d\nd.tensor._api", {"torch.distributed.tensor._api"}),
        ("from torch import distributed as d\nd._world", {"torch.distributed._world"}),
        ("from torch.distributed.tensor import DTensor\nDTensor.__name__", set()),
        ("import torch\ntorch._foreach_copy_([], [])", set()),
    ],
)
def test_a_private_use_would_be_seen(text: str, found: set[str]) -> None:
    assert private_uses(text) == found


def test_private_attributes_of_fsdp2_objects_stay_in_fsdp2() -> None:
    seen: dict[str, set[str]] = {}
    for path in sources():
        tree = ast.parse(path.read_text())
        names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        names |= {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        seen.setdefault(own_part(path), set()).update(n for n in names if PRIVATE_FSDP2.fullmatch(n))
    assert {part for part, names in seen.items() if names} == {"fsdp2"}


# --- nothing is unpickled -------------------------------------------------------------------------------------


def unsafe(text: str) -> set[str]:
    """Ways in which a source could run code that it reads or is sent."""
    tree = ast.parse(text)
    found = {m for m, _ in imports(tree) if m.split(".")[0] in UNPICKLING}
    named = {n for _, names in imports(tree) for n in names}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {n for n in named if OBJECT_COLLECTIVE.fullmatch(n)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("eval", "exec", "yaml.load", "yaml.unsafe_load"):
            found.add(called)
        if called == "torch.load" or called.endswith("numpy.load") or called == "np.load":
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if keywords.get("weights_only") != "True":
                found.add(f"{called}(weights_only={keywords.get('weights_only')})")
    return found


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_nothing_that_is_read_or_received_is_unpickled(path: Path) -> None:
    found = unsafe(path.read_text())
    if relative(path) in MAY_NAME_PICKLE:
        # The choice is passed on as Lightning's own strategies do; it is never False by itself.
        assert found <= {"pickle", "torch.load(weights_only=weights_only)"}
    else:
        assert found == set()


def test_the_exception_for_checkpoints_is_still_needed() -> None:
    assert all(unsafe((PACKAGE / name).read_text()) for name in MAY_NAME_PICKLE)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n    import pickle as p", {"pickle"}),
        ("from cloudpickle.x import loads", {"cloudpickle.x"}),
        ("dist.all_gather_object(a, b)", {"all_gather_object"}),
        ("from torch.distributed import broadcast_object_list as b", {"broadcast_object_list"}),
        ("dist.broadcast_object_list(a)", {"broadcast_object_list"}),
        ("torch.load(f)", {"torch.load(weights_only=None)"}),
        ("torch.load(f, weights_only=False)", {"torch.load(weights_only=False)"}),
        ("torch.load(f, weights_only=True)", set()),
        ("eval(x)", {"eval"}),
    ],
)
def test_an_unsafe_use_would_be_seen(text: str, found: set[str]) -> None:
    assert unsafe(text) == found


# --- size, names, documents -----------------------------------------------------------------------------------


def test_no_module_is_longer_than_a_head_holds() -> None:
    lengths = {relative(p): len(p.read_text().splitlines()) for p in sources()}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_modules_are_named_for_what_they_hold() -> None:
    assert [relative(p) for p in sources() if NONDESCRIPT & {*inside(p).with_suffix("").parts}] == []


def test_every_module_says_what_it_is() -> None:
    assert [relative(p) for p in sources() if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_nothing_installs_under_a_bare_name() -> None:
    assert not (PACKAGE / "kernels").exists(), "kernels and configs live at the top of the repository"
    assert not (PACKAGE / "configs").exists()
    listed = re.findall(r'^"([^"]+)" = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert dict(listed).items() >= {"tide_strategies/kernels": "kernels", "tide_strategies/configs": "configs"}.items()
    # Hydra's own namespace package, where it looks for what others bring.
    assert all(target.split("/")[0] == NAME or target == "hydra_plugins" for target, _ in listed)


def documented_fallbacks() -> dict[str, str]:
    """Code -> its section in the page."""
    text = (ROOT / "docs/fallbacks.md").read_text()
    pieces = re.split(r"^### (TIDE-F\d{3})\b.*$", text, flags=re.MULTILINE)
    codes = pieces[1::2]
    assert len(codes) == len(set(codes)), "a code is documented twice"
    return dict(zip(codes, pieces[2::2], strict=True))


def test_every_fallback_code_is_documented_and_every_documented_code_exists() -> None:
    assert documented_fallbacks().keys() == FALLBACKS.keys()
    assert list(documented_fallbacks()) == sorted(FALLBACKS), "in order"


@pytest.mark.parametrize("code", sorted(FALLBACKS))
def test_every_documented_code_says_what_why_and_what_to_do(code: str) -> None:
    section = documented_fallbacks()[code]
    for heading in ("**Means.**", "**Why.**", "**Do.**"):
        assert section.count(heading) == 1
        assert len(section.split(heading)[1].split("**")[0].split()) >= 4


def test_every_code_that_the_source_names_exists() -> None:
    named: set[str] = set()
    for path in sources():
        named |= set(re.findall(r"TIDE-(?:F\d+|OK)", path.read_text()))
    assert named - {OK} == FALLBACKS.keys()
