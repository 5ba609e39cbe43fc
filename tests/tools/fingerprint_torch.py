"""Print, add or verify the fingerprints of torch's FSDP2 (developer tool; see docs/supported_torch.md).

    python tests/tools/fingerprint_torch.py                     print those of the installed torch
    python tests/tools/fingerprint_torch.py SOURCE ...          print those of unpacked sources, without importing torch
    python tests/tools/fingerprint_torch.py --update SOURCE ... add them to fingerprints.json
    python tests/tools/fingerprint_torch.py --check [SOURCE ..] exit status 1 where one is not accepted

SOURCE is a folder that holds ``torch/version.py`` and ``torch/distributed/fsdp/_fully_shard``, as
``unzip WHEEL 'torch/version.py' 'torch/distributed/fsdp/*' -d SOURCE`` leaves it.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any


def _load_guards() -> types.ModuleType:
    """The guards by their path: importing them as part of their package would import torch."""
    path = Path(__file__).parents[2] / "tide_strategies/fsdp2/guards.py"
    spec = importlib.util.spec_from_file_location("_tide_guards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


guards = _load_guards()


def signature_of_node(node: ast.AST) -> str:
    """Parameter names, kinds and defaults of a definition; for a class, the names that its body assigns."""
    if isinstance(node, ast.ClassDef):
        names: list[str] = []
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                names.append(item.target.id)
            elif isinstance(item, ast.Assign):
                names.extend(t.id for t in item.targets if isinstance(t, ast.Name))
        return f"class {', '.join(names)}"
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    a = node.args
    plain = [p.arg for p in (*a.posonlyargs, *a.args)]
    kwonly = [p.arg for p in a.kwonlyargs]
    defaults = [_default_text(d) for d in a.defaults]
    keyword = {name: _default_text(d) for name, d in zip(kwonly, a.kw_defaults, strict=True) if d is not None}
    vararg, kwarg = (p.arg if p is not None else None for p in (a.vararg, a.kwarg))
    return guards.signature_text(plain, len(a.posonlyargs), defaults, vararg, kwonly, keyword, kwarg)


def _default_text(node: ast.expr) -> str:
    try:
        return guards.value_text(ast.literal_eval(node))
    except ValueError:
        return "<expression>"


def read_source(folder: Path) -> dict[str, Any]:
    """What ``folder`` (the parent of ``torch``) holds: version, file hashes, signature and fingerprint by function."""
    found = re.search(r"^__version__ = ['\"]([^'\"+]+)", (folder / "torch/version.py").read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{folder}/torch/version.py has no __version__")
    files: dict[str, str] = {}
    functions: dict[str, list[str] | None] = {}
    for module in guards.MODULES:
        data = (folder / "torch/distributed/fsdp/_fully_shard" / f"{module}.py").read_bytes()
        files[module] = guards.file_hash(data)
        index = guards.index_source(data.decode("utf-8"))
        for name in guards.targets(module):
            node = index.get(name)
            functions[f"{module}:{name}"] = (
                None if node is None else [signature_of_node(node), guards.fingerprint(node)]
            )
    return {"version": found[1], "files": files, "functions": functions}


def merge(table: dict[str, Any], source: dict[str, Any]) -> None:
    """Add a release to the table: another accepted pair wherever it differs from the ones already there."""
    minor = ".".join(map(str, guards.minor_of(source["version"])))
    entry = table.setdefault(minor, {"versions": [], "files": {}, "functions": {}})
    _add(entry["versions"], source["version"])
    for kind in ("files", "functions"):
        for name, value in source[kind].items():
            _add(entry[kind].setdefault(name, []), value)


def _add(values: list[Any], value: Any) -> None:
    if value not in values:
        values.append(value)


def differences(table: dict[str, Any], source: dict[str, Any]) -> list[str]:
    """Functions of a release that its minor version's entry does not accept."""
    minor = ".".join(map(str, guards.minor_of(source["version"])))
    if minor not in table:
        return [f"torch {minor} is not in the table"]
    accepted = table[minor]["functions"]
    return [name for name, pair in source["functions"].items() if pair not in accepted.get(name, [])]


def dump(table: dict[str, Any]) -> str:
    """JSON with one line per function, so that a diff shows what a release changed."""
    ordered = dict(sorted(table.items(), key=lambda item: guards.minor_of(item[0])))
    text = json.dumps({"format": guards.FORMAT, "torch": ordered}, indent=1)
    # Values of functions, files and versions: lists without objects inside, each put on one line.
    return re.sub(r"\[[^\[\]{}]*(?:\[[^\[\]{}]*\][^\[\]{}]*)*\]", lambda m: re.sub(r"\s*\n\s*", " ", m[0]), text) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", nargs="*", type=Path, help="unpacked sources; the installed torch if none is given")
    parser.add_argument("--update", action="store_true", help="write them into fingerprints.json")
    parser.add_argument("--check", action="store_true", help="compare them with fingerprints.json")
    parser.add_argument("--rebuild", action="store_true", help="with --update: start from an empty table")
    args = parser.parse_args(argv)
    folders: list[Path] = args.source
    if not folders:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            parser.error("torch is not installed; name a source folder")
        folders = [Path(spec.origin).parents[1]]
    sources = [read_source(folder) for folder in folders]
    if args.update:
        table = {} if args.rebuild else guards.load_table()
        for source in sources:
            merge(table, source)
        guards.FINGERPRINTS.write_text(dump(table), "utf-8")
    elif not args.check:
        print(json.dumps(sources, indent=1))
        return 0
    status = 0
    table = guards.load_table()
    for source in sources:
        wrong = differences(table, source)
        print(f"torch {source['version']}: {'; '.join(wrong) if wrong else 'accepted'}")
        status |= bool(wrong)
    return status


if __name__ == "__main__":
    sys.exit(main())
