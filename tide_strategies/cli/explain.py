"""``tide explain``: would TIDE accelerate each parameter group of this model, and if not, why, and what helps?"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tide_strategies.cli.arguments import positive
from tide_strategies.cli.tables import gib, table, wrapped
from tide_strategies.config import TideConfig
from tide_strategies.detect import FALLBACKS, OK
from tide_strategies.errors import TideConfigError
from tide_strategies.planner import limits
from tide_strategies.planner.reading import read_bytes

#: No configuration is larger.
_MOST_BYTES = 1 << 20

_ABOUT = """\
MODEL is a Python path, package.module:function, where the function returns the model. It is called on the meta device,
in this one process, within a process group of ranks that do not exist: no memory for weights, no job, no GPU. If the
function applies fully_shard itself (over a mesh of "cpu" ranks), that is what is judged; otherwise the model is wrapped
as the Lightning and Accelerate doors wrap it. --device says what the ranks of the job run on; this machine need not
have it. What depends on the machine is told by tide doctor. A code alone explains that code:

  tide explain my_project.model:build --ranks 8 --set all_gather.slots=3
  tide explain TIDE-F012
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide explain``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ABOUT
    add = parser.add_argument
    add("model", metavar="MODEL", help="package.module:function, or a code such as TIDE-F012")
    add("--ranks", type=positive, default=8, help="ranks to shard over (default: 8)")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="what the ranks run on (default: cuda)")
    add(
        "--precision",
        choices=["bf16-mixed", "bf16-true", "32-true"],
        default="bf16-mixed",
        help="for models that are not sharded yet (default: bf16-mixed)",
    )
    add("--config", type=Path, help="options as a JSON (or YAML) file")
    add("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option, for example all_gather.slots=3")
    add("--strict", action="store_true", help="exit with 1 if any group falls back")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Explain a code, or the groups of a model."""
    if arguments.model.upper() in FALLBACKS:
        return _code(arguments.model.upper(), arguments.json)
    if arguments.model.upper().startswith("TIDE-"):
        raise TideConfigError(f"no code {arguments.model!r}; codes are {min(FALLBACKS)} to {max(FALLBACKS)}, with gaps")
    if ":" not in arguments.model:
        raise TideConfigError(f"MODEL is package.module:function or a code; got {arguments.model!r}")
    if arguments.ranks > limits.MOST_RANKS:
        raise TideConfigError(f"--ranks must be at most {limits.MOST_RANKS}; got {arguments.ranks}")
    config = TideConfig.from_any(read_options(arguments.config, arguments.set))
    print(f"building {arguments.model} on the meta device ...", file=sys.stderr, flush=True)
    groups = _verdicts(arguments.model, arguments.ranks, arguments.device, arguments.precision, config)
    print(json.dumps(groups, indent=1) if arguments.json else _words(groups))
    return int(arguments.strict and any(g["code"] != OK for g in groups["groups"]))


def read_options(file: Path | None, settings: list[str]) -> dict[str, Any]:
    """Options from a file and from OPTION=VALUE texts, which win.

    Raises:
        TideConfigError: the file cannot be read, or a text has no ``=``.
    """
    options: dict[str, Any] = {}
    if file is not None:
        options = _options_of(file)
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise TideConfigError(f"--set takes OPTION=VALUE; got {text!r}")
        try:
            parsed: Any = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value
        section = options
        *path, last = name.split(".")
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise TideConfigError(f"--set {name}: {part!r} is a value, not a section")
        section[last] = parsed
    return options


def _options_of(file: Path) -> dict[str, Any]:
    try:
        text = read_bytes(file, _MOST_BYTES).decode()
        if file.suffix == ".json":
            options = json.loads(text)
        else:
            try:
                from yaml import safe_load
            except ImportError:
                raise TideConfigError("it is not .json, and PyYAML is not installed") from None
            options = safe_load(text)
    except TideConfigError as e:
        raise TideConfigError(f"cannot read options from {file}: {e}") from None
    except Exception as e:  # whatever a YAML file can raise
        raise TideConfigError(f"cannot read options from {file}: {type(e).__name__}: {e}") from None
    if not isinstance(options, dict):
        raise TideConfigError(f"{file} holds no mapping of options")
    return options


def _verdicts(path: str, ranks: int, device: str, precision: str, config: TideConfig) -> dict[str, Any]:
    from tide_strategies.cli.offline import imagined_job, model_of, sharded
    from tide_strategies.fsdp2 import access
    from tide_strategies.fsdp2.describe import planner_groups
    from tide_strategies.fsdp2.guards import check_torch

    guard = check_torch()
    torch = {"code": guard.code, "reason": guard.reason}
    out: dict[str, Any] = {"model": path, "ranks": ranks, "device": device, "torch": torch}
    if not guard.supported:
        return {**out, "groups": [], "remedy": guard.remedy}
    from tide_strategies.fsdp2.eligibility import group_verdict

    with imagined_job(ranks):
        groups = [g for root in sharded(model_of(path), ranks, precision) for g in access.param_groups(root)]
        described = planner_groups(groups)
        verdicts = [group_verdict(g, config, device) for g in groups]
    out["groups"] = [
        {
            "name": group.name,
            "parameters": len(group.params),
            "unsharded_bytes": group.layout(ranks).landing_bytes,
            "resharded": group.resharded,
            "code": verdict.code,
            "reason": verdict.reason,
            "remedy": verdict.remedy,
        }
        for group, verdict in zip(described, verdicts, strict=True)
    ]
    return out


def _words(found: dict[str, Any]) -> str:
    if not found["groups"]:
        return wrapped(
            f"No group is accelerated: {found['torch']['code']} {found['torch']['reason']} {found['remedy']}"
        )
    groups = found["groups"]
    fast = sum(g["code"] == OK for g in groups)
    rows = [
        (g["name"], g["parameters"], gib(g["unsharded_bytes"]), "yes" if g["resharded"] else "no", g["code"])
        for g in groups
    ]
    lines = [
        f"{found['model']} over {found['ranks']} {'GPU' if found['device'] == 'cuda' else 'CPU'} ranks: "
        f"{fast} of {len(groups)} groups accelerated",
        "",
        table(["group", "parameters", "unsharded", "reshards", "verdict"], rows),
    ]
    for code, number in Counter(g["code"] for g in groups if g["code"] != OK).items():
        first = next(g for g in groups if g["code"] == code)
        lines += ["", f"{code} ({number} groups, the first is {first['name']})"]
        lines += [wrapped(first["reason"], "  "), wrapped(f"Remedy: {first['remedy']}", "  ")]
    return "\n".join(lines)


def _code(code: str, as_json: bool) -> int:
    reason, remedy = FALLBACKS[code]
    reason = reason.replace("{}", "...")
    if as_json:
        print(json.dumps({"code": code, "reason": reason, "remedy": remedy}, indent=1))
    else:
        print(f"{code}: {reason}")
        print(wrapped(f"Remedy: {remedy}", "  "))
        print("  More: docs/fallbacks.md")
    return 0
