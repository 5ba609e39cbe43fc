"""Run every snippet of README.md and docs/*.md as written, with the wheel installed in a fresh environment.

    python tests/tools/run_snippets.py                   all: half an hour on two cores, and the package index
    python tests/tools/run_snippets.py --ranks-only      only Python that runs at once, on two ranks: seconds
    python tests/tools/run_snippets.py docs/hydra.md ... some pages
    python tests/tools/run_snippets.py --list            what is run, and what is not and why

Each page has a folder: its files are saved there and its commands typed there, from top to bottom; what needs a
checkout is typed in a copy of this one. What a reader brings, and what is not run here, is in snippet_readers.py.
``--environment FOLDER`` takes an environment that is there already, or keeps the one that is made; ``--timeout`` is for
machines that have other things to do. Exit status: 0 if
all went well, 1 if a snippet failed, 2 if that list is not that of the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from fresh_environment import build_wheel, outside, whole_environment
from snippet_readers import FILES, WITHOUT_GPU, not_run, stale, use_of
from snippets import ROOT, SHELL, Command, Snippet, snippets

#: What LightningCLI needs beside Lightning.
EXTRA = ("jsonargparse[signatures]>=4.27",)
#: A launch that says nothing of TIDE has not found it.
LAUNCH = re.compile(r"^(accelerate launch|python -m tide_strategies\.launch)\b")
FOUND = re.compile(r"TIDE: \d+ of \d+ groups accelerated")


@dataclass
class Outcome:
    """What came of one snippet or command: ``error`` is empty if it did what the page says."""

    where: str
    what: str
    error: str = ""
    not_run: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """The line of the table."""
        state = f"not run: {self.not_run}" if self.not_run else "FAILED" if self.error else f"ok {self.seconds:4.0f} s"
        return f"{self.where:28} {state:10} {self.what}"


@dataclass
class Runner:
    """Runs snippets with the programs of one environment, below one folder."""

    environment: Path
    folder: Path
    gpu: bool
    timeout_s: float = 900
    outcomes: list[Outcome] = field(default_factory=list)
    #: What was typed in the checkout before: a second page's same command is the same run.
    in_checkout: dict[str, Outcome] = field(default_factory=dict)

    def project(self, page: str) -> Path:
        """The folder of a page, with the files of its reader."""
        folder = self.folder / page.removesuffix(".md").replace("/", "_")
        if not folder.exists():
            folder.mkdir(parents=True)
            for name, text in FILES.get(page, {}).items():
                _save(folder / name, text)
        return folder

    def checkout(self) -> Path:
        """A copy of the checkout as it is now, without what is not in version control."""
        folder = self.folder / "checkout"
        if not folder.exists():
            listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
            names = subprocess.run(listed, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout
            for name in filter(None, names.split("\0")):
                if (ROOT / name).is_file():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, folder / name)
        return folder

    def report(self, outcome: Outcome) -> None:
        """Keep and print an outcome."""
        self.outcomes.append(outcome)
        print(outcome.line(), flush=True)
        if outcome.error:
            print("\n".join(f"    {line}" for line in outcome.error.strip().splitlines()[-40:]), flush=True)

    def run(self, snippet: Snippet) -> None:
        """Run one snippet that is not Python for the ranks."""
        use = use_of(snippet.page, snippet.code)
        if snippet.language in SHELL:
            for command in snippet.commands():
                self.command(command)
            return
        project = self.project(snippet.page)
        for text in use.first:
            self.command(Command(snippet.page, snippet.line, text))
        name = snippet.file or use.save_as
        _save(project / name, source(snippet).lstrip("\n"), append=bool(use.save_as))
        self.report(Outcome(snippet.where, f"saved as {name}"))
        for text in use.then:
            self.command(Command(snippet.page, snippet.line, text))

    def command(self, command: Command) -> None:
        """Run one command as a shell in the page's folder would, or in the checkout."""
        where = f"{command.page}:{command.line}"
        if why := not_run(command):
            self.report(Outcome(where, command.text, not_run=why))
            return
        if command.in_checkout and command.text in self.in_checkout:
            first = self.in_checkout[command.text]
            self.report(Outcome(where, f"{command.text} (as at {first.where})", first.error))
            return
        for text in use_of(command.page, command.text).first:
            self.command(Command(command.page, command.line, text))
        text = command.text
        for old, new, _ in WITHOUT_GPU if not self.gpu else ():
            text = text.replace(old, new)
        began = time.monotonic()
        status, output = self._shell(text, self.checkout() if command.in_checkout else self.project(command.page))
        error = ""
        if status != 0:
            error = f"exit status {status}\n{output}"
        elif LAUNCH.match(command.text) and not FOUND.search(output):
            error = f"TIDE was not found\n{output}"
        elif command.shown and not like(command.shown, output):
            error = f"the page shows\n{command.shown}but it prints\n{output}"
        outcome = Outcome(where, text, error, seconds=time.monotonic() - began)
        if command.in_checkout:
            self.in_checkout[command.text] = outcome
        self.report(outcome)

    def _shell(self, text: str, folder: Path) -> tuple[int, str]:
        # A home of its own: what earlier runs cached there must not help.
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=outside(PATH=path, HOME=str(home), OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, f"{process.communicate()[0]}\ndid not end within {self.timeout_s:g} s"
        return process.returncode, output

    def ranks(self, found: list[Snippet], processes: int = 2) -> None:
        """Run the Python snippets that are no files, all pages in the same two processes."""
        pages: dict[str, dict[str, object]] = {}
        for snippet in found:
            page = pages.setdefault(snippet.page, {"folder": str(self.project(snippet.page)), "pieces": []})
            page["pieces"].append((snippet.where, source(snippet)))  # type: ignore[attr-defined]
        pieces = self.folder / "pieces.json"
        pieces.write_text(json.dumps(list(pages.values())))
        began = time.monotonic()
        results, outputs = self._start_ranks(pieces, processes)
        ran = set.intersection(*(set(r["ran"]) for r in results))
        site = self.environment / "lib"
        for snippet in found:
            outcome = Outcome(snippet.where, f"Python on {processes} ranks", seconds=time.monotonic() - began)
            began = time.monotonic()
            if snippet.where not in ran:
                errors = [r["error"] for r in results if snippet.where not in r["ran"] and r["error"]]
                outcome.error = "\n".join(errors) or "did not come to it, or did not end\n" + "\n".join(outputs)
            elif not all(Path(r["package"]).is_relative_to(site) for r in results):
                outcome.error = f"the package is not that of {self.environment}: {results[0]['package']}"
            self.report(outcome)

    def _start_ranks(self, pieces: Path, processes: int) -> tuple[list[dict[str, object]], list[str]]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1]), "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        # What plan: auto chooses depends on the machine; here TIDE is to run. Ranks are CPU processes.
        shared |= {"TIDE_PLAN": "tide", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        files = [self.folder / f"result-{rank}.json" for rank in range(processes)]
        python, script = self.environment / "bin/python", Path(__file__).with_name("snippet_ranks.py")
        started = [
            subprocess.Popen(
                [python, script, pieces, file],
                cwd=self.folder,
                env=outside(**shared, RANK=str(rank), LOCAL_RANK=str(rank)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, file in enumerate(files)
        ]
        outputs, deadline = [], time.monotonic() + 150
        for process in started:
            try:
                outputs.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                outputs.append(process.communicate()[0])
        results = [json.loads(f.read_text()) if f.exists() else {"package": "", "ran": [], "error": ""} for f in files]
        for result, process, output in zip(results, started, outputs, strict=True):
            if process.returncode and not result["error"]:
                result["ran"], result["error"] = [], f"exit status {process.returncode}\n{output}"
        return results, outputs


def source(snippet: Snippet) -> str:
    """The reader's code and the snippet, with the snippet's lines at their numbers where that is possible."""
    use = use_of(snippet.page, snippet.code)
    own = iter(use.own)
    code = "\n".join(
        line.replace("...", next(own)) if line.strip() == "..." else line for line in snippet.code.splitlines()
    )
    before = use.before.rstrip("\n") + "\n" if use.before else ""
    return f"{before}{chr(10) * (snippet.line - 1 - before.count(chr(10)))}{code}\n{use.after}"


def for_ranks(snippet: Snippet) -> bool:
    """Whether it is Python that is run at once."""
    return snippet.language == "python" and not use_of(snippet.page, snippet.code).save_as


def like(shown: str, output: str) -> bool:
    """Whether a program printed what the page shows: any numbers, spaces and line ends; ``...`` is anything."""
    words = re.sub(r"\\?\s+", " ", re.escape(" ".join(shown.split())))
    pattern = re.sub(r"\d+", r"\\d+", words).replace(re.escape("..."), ".*")
    return re.search(pattern, " ".join(output.split())) is not None


def _save(path: Path, text: str, append: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as f:
        f.write(text)


def main() -> int:
    """Run, print a line for each; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("pages", nargs="*", metavar="PAGE", help="README.md, docs/hydra.md, ... (default: all)")
    add("--ranks-only", action="store_true", help="only Python that runs at once")
    add("--environment", type=Path, help="an environment to use, or to make and keep")
    add("--timeout", type=float, default=900, help="seconds that a command may take (default: %(default)s)")
    add("--list", action="store_true", help="say what is run")
    args = parser.parse_args()
    found = snippets()
    problems = stale(found)
    problems += [f"there is no page {page}" for page in args.pages if page not in {s.page for s in found}]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    found = [s for s in found if s.language and (not args.pages or s.page in args.pages)]
    found.sort(key=lambda s: args.pages.index(s.page) if args.pages else 0)
    if args.list:
        for s in found:
            for c in s.commands() if s.language in SHELL else [Command(s.page, s.line, s.language)]:
                why = not_run(c)
                print(f"{c.page}:{c.line}  {c.text}" + (f"  (not run: {why})" if why else ""))
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        environment = (args.environment or Path(tmp, "environment")).resolve()
        if not (environment / "bin/python").exists():
            print("making a fresh environment", flush=True)
            whole_environment(environment, build_wheel(Path(tmp)), *EXTRA)
        runner = Runner(environment, Path(tmp, "work"), shutil.which("nvidia-smi") is not None, args.timeout)
        runner.folder.mkdir()
        if at_once := [s for s in found if for_ranks(s)]:
            runner.ranks(at_once)
        for snippet in [] if args.ranks_only else [s for s in found if not for_ranks(s)]:
            runner.run(snippet)
    failed = sum(bool(o.error) for o in runner.outcomes)
    left_out = sum(bool(o.not_run) for o in runner.outcomes)
    print(f"{len(runner.outcomes) - failed - left_out} ok, {failed} failed, {left_out} not run")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
