"""The tools that run the pages' snippets and many launches: what they call a success, on programs written here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch_many import Door, Launches, launch_many
from run_snippets import Runner, like, source
from snippet_readers import NOT_RUN, USES, Use
from snippets import Command, Snippet


def test_commands_of_a_shell_snippet() -> None:
    text = "# a remark\nmake demo   # two minutes\n\nls a \\\n  b\n"
    assert Snippet("p", 7, "console", text).commands() == [Command("p", 8, "make demo"), Command("p", 10, "ls a b")]
    (command,) = Snippet("p", 7, "console", "$ tide x\nrank 12 of\n34 ...\n").commands()
    assert command == Command("p", 7, "tide x", "rank 12 of\n34 ...\n")


def test_what_a_page_shows_is_like_what_is_printed() -> None:
    shown = "rank 12 (pid 34) of\n'blocks.0' ...\n"
    assert like(shown, "so:\nrank 1\n(pid 7) of 'blocks.2' and more\n")
    assert not like(shown, "rank one (pid 7) of 'blocks.2' and more")


def test_a_snippet_keeps_its_line_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(USES, ("p", "a = 1"), Use(before="x = 0\n", own=("train()",), after="check()"))
    lines = source(Snippet("p", 7, "python", "a = 1\nif a:\n    ...\n")).splitlines()
    assert (lines[0], lines[6:]) == ("x = 0", ["a = 1", "if a:", "    train()", "check()"])


def test_a_command_succeeds_if_it_does_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tmp_path / "environment", tmp_path, gpu=False)
    program = tmp_path / "environment/bin/accelerate"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho $@\n")
    program.chmod(0o700)

    def error(text: str, shown: str = "") -> str:
        runner.command(Command("docs/x.md", 3, text, shown))
        return runner.outcomes[-1].error

    assert error("echo 12 groups; pwd", "11 groups") == ""
    assert "exit status 3\nwords" in error("echo words; false || exit 3")
    assert "the page shows\n11 groups" in error("echo no groups", "11 groups")
    assert "exit status" in error("false; true"), "the shell stops at the first error"
    said = error("accelerate launch --config tide.yaml train.py")
    assert said == "TIDE was not found\nlaunch --cpu --config tide.yaml train.py\n", (
        "--cpu: the page's words without a GPU"
    )
    monkeypatch.setitem(NOT_RUN, ("docs/x.md", "exit"), "needs nothing")
    assert error("exit 1") == ""
    assert "not run: needs nothing" in runner.outcomes[-1].line()


def test_launches_are_good_if_they_end_well_and_were_accelerated() -> None:
    """By exit code; a training that TIDE was not in is no success either, nor one that has left no checkpoint."""
    script = "import sys\nprint('2 of 2 groups accelerated')\nsys.exit(3)\n"
    result = Launches()
    for text in (script, script.replace("3)", "0)"), script.replace("2 of 2", "0 of 2").replace("3)", "0)")):
        launch_many(Door("json", "train.py", {"train.py": text}), 2, sys.executable, result)
    assert result.codes == {"0": 4, "3": 2}
    assert result.silent == 2
    assert len(result.bad) == 4
    good = script.replace("3)", "0)") + "# and with a checkpoint\n"
    once = "import os\nif not os.path.exists('was'): open('was', 'w'), open('saved', 'w')\n" + good
    for text in (good, once):  # the second time, the checkpoint of the first one is gone
        launch_many(Door("json", "train.py", {"train.py": text}, "saved"), 2, sys.executable, result)
    assert result.nothing_left == 3
    assert len(result.bad) == 7
    assert result.row("x").split()[:8] == ["x", "10", "0:", "8,", "3:", "2", "2", "3"]
