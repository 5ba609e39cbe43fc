"""Run PyTorch's own tests of FSDP2 with TIDE under them (developer tool).

    python tests/tools/run_torch_fsdp2_tests.py --pytorch PATH             all files that can run here
    python tests/tools/run_torch_fsdp2_tests.py --pytorch PATH FILE ...    some
    python tests/tools/run_torch_fsdp2_tests.py --list                     which files, what they need, which not

PATH is a checkout of PyTorch of the installed torch's version (``git clone --depth 1 --branch v2.13.0 ...``); nothing
in it is changed. It needs pytest and expecttest. Each file runs with ``fully_shard`` replaced by one that adds TIDE.
What fails runs once more without TIDE, so that the table tells TIDE's failures from torch's own. Tests that replace or
count torch's collectives are left out, because with TIDE there are none to see (``--all`` runs them too).

Exit status: 0 if no test fails that passes without TIDE, 1 if one does, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

TOOLS = Path(__file__).parent
FOLDER = Path("test/distributed/_composable/fsdp")

#: Files that are run, and the GPUs without which none of their tests can train on several ranks.
FILES = {
    "test_fully_shard_autograd.py": 2,
    "test_fully_shard_clip_grad_norm_.py": 2,
    "test_fully_shard_comm.py": 2,
    "test_fully_shard_extensions.py": 2,
    "test_fully_shard_frozen.py": 2,
    "test_fully_shard_ignore_params.py": 2,
    "test_fully_shard_init.py": 0,
    "test_fully_shard_mixed_precision.py": 2,
    "test_fully_shard_state.py": 0,
    "test_fully_shard_state_dict.py": 2,
    "test_fully_shard_training.py": 0,
}
NOT_RUN = {
    "test_fully_shard_compile.py": "traces torch's collectives into graphs",
    "test_fully_shard_memory.py": "compares with what torch's allocator holds; TIDE's memory is outside of it",
    "test_fully_shard_overlap.py": "puts kernels that sleep in the place of torch's collectives",
    "test_fully_shard_grad_scaler.py": "float16, which TIDE leaves to stock collectives",
}
#: Names by which a test replaces or counts torch's collectives.
LOOKS_AT_COLLECTIVES = re.compile(
    r"patch_all_gather|patch_reduce_scatter|patch_all_reduce|patch_foreach_\w+|patch_unshard|patch_reshard|"
    r"patch_post_backward|patch_register_post_backward\w*|CommDebugMode|set_custom_\w+|foreach_all_gather\w*|foreach_reduce"
)


NEEDED = ("pytest", "expecttest", "numpy")


class Unusable(Exception):
    """Nothing can be run; the words say why and what to do."""


@dataclass
class Outcome:
    """What came of one file. ``failed`` maps each test to the last line of its error."""

    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stock_fails: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    with_tide: set[str] = field(default_factory=set)
    codes: Counter[str] = field(default_factory=Counter)
    broken: str = ""


def find_tests(pytorch: Path | None) -> Path:
    """The folder of FSDP2's tests in a checkout that fits the installed torch."""
    if pytorch is None:
        raise Unusable("give a checkout of PyTorch: --pytorch PATH (git clone https://github.com/pytorch/pytorch)")
    folder = pytorch / FOLDER
    if not folder.is_dir():
        raise Unusable(f"{pytorch} is no checkout of PyTorch: it has no folder {FOLDER}")
    import torch

    try:
        version = (pytorch / "version.txt").read_text().strip()
    except OSError:
        raise Unusable(f"{pytorch} is no checkout of PyTorch: it has no version.txt") from None
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        tag = torch.__version__.split("+")[0]
        raise Unusable(
            f"the checkout is of torch {version}, installed is {torch.__version__}: check out the tag v{tag}"
        )
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise Unusable(f"torch's tests need {', '.join(missing)}: pip install {' '.join(missing)}")
    return folder


def chosen(names: list[str], folder: Path, gpus: int) -> list[str]:
    """The files to run: those named, or all that can run on this machine."""
    for name in names:
        if name not in FILES:
            why = NOT_RUN.get(name, "it is not on the list")
            raise Unusable(f"{name} is not run: {why}. Files that are: {', '.join(FILES)}")
        if gpus < FILES[name]:
            here = ", ".join(n for n, needed in FILES.items() if needed <= gpus)
            raise Unusable(f"{name} needs {FILES[name]} GPUs, and torch sees {gpus} here. Without: {here}")
        if not (folder / name).is_file():
            raise Unusable(f"{folder} has no {name}")
    found = [n for n, needed in FILES.items() if needed <= gpus and (folder / n).is_file()]
    if not names and not found:
        raise Unusable(f"{folder} holds none of the files {', '.join(FILES)}")
    return names or found


def looking_at_collectives(source: str) -> list[str]:
    """``Class::test`` of each test that mentions such names itself or in methods of its class that it mentions."""
    found = []
    for cls in (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)):
        methods = {n.name: ast.dump(n) for n in cls.body if isinstance(n, ast.FunctionDef)}
        mentions = {
            name: {other for other in methods if other != name and f"attr='{other}'" in text}
            for name, text in methods.items()
        }
        looks = {name for name, text in methods.items() if LOOKS_AT_COLLECTIVES.search(text)}
        while True:
            more = {name for name in methods if mentions[name] & looks} - looks
            if not more:
                break
            looks |= more
        found += [f"{cls.name}::{name}" for name in methods if name in looks and name.startswith("test")]
    return found


def run_file(name: str, folder: Path, everything: bool, timeout_s: float) -> Outcome:
    """Run one file with TIDE, and what fails without it."""
    outcome = Outcome()
    left_out = [] if everything else looking_at_collectives((folder / name).read_text())
    with tempfile.TemporaryDirectory() as tmp:
        stand_in, tally = Path(tmp, name), Path(tmp, "tally")
        tally.touch()
        stand_in.write_text(_STAND_IN.format(tools=str(TOOLS), folder=str(folder), original=str(folder / name)))
        deselected = [word for test in left_out for word in ("--deselect", f"{name}::{test}")]
        outcome.left_out = left_out
        outcome.broken = _pytest([name, *deselected], Path(tmp), timeout_s, {"TIDE_PEER_TALLY": str(tally)}, outcome)
        for line in map(json.loads, tally.read_text().splitlines()):
            if line["tide"]:
                outcome.with_tide.add(line["test"])
            outcome.codes.update(line["codes"])
        if outcome.failed:
            again = Outcome()
            tests = [f"{name}::{test}" for test in outcome.failed]
            _pytest(tests, Path(tmp), timeout_s, {"TIDE_PEER_OFF": "1"}, again)
            outcome.stock_fails = set(outcome.failed) - set(again.passed)
    return outcome


# A file of the same name, because the processes that a test starts import it by that name. The original's folder comes
# last on the path, so that they find this one.
_STAND_IN = """\
import sys

sys.path += [{tools!r}, {folder!r}]
import tide_in_torch_tests

tide_in_torch_tests.install()
with open({original!r}, encoding="utf-8") as source:
    exec(compile(source.read(), {original!r}, "exec"))
"""


def _pytest(arguments: list[str], folder: Path, timeout_s: float, env: dict[str, str], outcome: Outcome) -> str:
    """Run pytest in ``folder`` and read its results into ``outcome``; returns what kept it from running, or nothing."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    # The stand-in's folder must not be searched for this package, nor this project's options apply.
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), f"--junitxml={report}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"did not end within {timeout_s:.0f} s"
    if process.returncode not in (0, 1) or not report.is_file():
        errors = [line for line in output.splitlines() if line.startswith("E ")]
        return (errors[-1][1:].strip() if errors else output.strip()[-300:]) or f"exit status {process.returncode}"
    _read(report, outcome)
    return ""


_ERROR = re.compile(r"^E\s+((?:\w+\.)*\w+(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)


def _read(report: Path, outcome: Outcome) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            text = problem.text or ""
            errors = _ERROR.findall(text) or (problem.get("message") or text or "no message").strip().splitlines()
            outcome.failed[name] = errors[-1]
        elif case.find("skipped") is not None:
            outcome.skipped.append(name)
        else:
            outcome.passed.append(name)


def table(outcomes: dict[str, Outcome]) -> str:
    """One line a file, then the failures."""
    head = ("file", "passed", "with TIDE", "skipped", "left out", "failed", "as stock too")
    rows = [head]
    for name, o in outcomes.items():
        counts = (len(o.passed), len(o.with_tide), len(o.skipped), len(o.left_out), len(o.failed), len(o.stock_fails))
        rows.append((name, *("-" if o.broken else str(n) for n in counts)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    for name, o in outcomes.items():
        if o.broken:
            lines.append(f"NOT RUN  {name}: {o.broken}")
        lines += [f"FAIL  {name}::{test}: {words}" for test, words in o.failed.items() if test not in o.stock_fails]
        lines += [f"fails without TIDE too  {name}::{test}" for test in o.failed if test in o.stock_fails]
        if o.codes:
            lines.append(f"{name}: groups on the stock path: {', '.join(sorted(o.codes))} (docs/fallbacks.md)")
    return "\n".join(lines)


def main() -> int:
    """Run, print the table, return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[2:]), formatter_class=_RAW
    )
    parser.add_argument("--pytorch", type=Path, metavar="PATH", help="a checkout of PyTorch")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each file (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="also tests that replace or count torch's collectives")
    parser.add_argument("--list", action="store_true", help="say which files are run, and which are not and why")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every test's result there")
    parser.add_argument("files", nargs="*", metavar="FILE", help="names of files (default: all that can run here)")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{n}: {f'needs {g} GPUs' if g else 'runs without a GPU'}" for n, g in FILES.items()))
        print("\n".join(f"{n}: not run: {why}" for n, why in NOT_RUN.items()))
        return 0
    try:
        folder = find_tests(args.pytorch)
        import torch

        gpus = torch.cuda.device_count()
        names = chosen(args.files, folder, gpus)
    except Unusable as e:
        print(f"{Path(__file__).name}: {e}", file=sys.stderr)
        return 2
    skipped = [n for n, needed in FILES.items() if needed > gpus]
    if skipped and not args.files:
        print(f"torch sees {gpus} GPUs; not run for want of 2: {', '.join(skipped)}", flush=True)
    if unknown := sorted(p.name for p in folder.glob("test_*.py") if p.name not in FILES and p.name not in NOT_RUN):
        print(f"not run, because this tool does not know them: {', '.join(unknown)}", flush=True)
    outcomes = {}
    for name in names:
        print(f"running {name}", flush=True)
        outcomes[name] = run_file(name, folder.resolve(), args.all, args.timeout)
    print(table(outcomes))
    if args.json:
        args.json.write_text(json.dumps({n: vars(o) for n, o in outcomes.items()}, indent=1, default=sorted))
    return int(any(o.broken or set(o.failed) - o.stock_fails for o in outcomes.values()))


_RAW = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main())
