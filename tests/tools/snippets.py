"""The snippets of README.md and docs/*.md: what the pages tell a reader to type, to save or to paste."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^( *)(```+)(\w*)\n(.*?)^ *\2 *$", re.MULTILINE | re.DOTALL)
SHELL = ("console", "bash")
#: Blocks without a language are what a program prints.
LANGUAGES = (*SHELL, "python", "yaml", "")


@dataclass(frozen=True)
class Command:
    """One command of a shell snippet, and what the page shows under it (empty if nothing)."""

    page: str
    line: int
    text: str
    shown: str = ""

    @property
    def in_checkout(self) -> bool:
        """Whether it is typed in a checkout: it names what only that has."""
        return re.search(r"^make\b|^pip install \.|\b(examples|configs)/", self.text) is not None


@dataclass(frozen=True)
class Snippet:
    """One fenced block. ``line`` is that of its first line of code, counted from 1."""

    page: str
    line: int
    language: str
    code: str

    @property
    def where(self) -> str:
        """For a person: page and line."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that it is to be saved as, if its first line says so."""
        named = re.match(r"# ([\w./-]+\.\w+)\n", self.code)
        return named[1] if named else ""

    def commands(self) -> list[Command]:
        """The commands of a shell snippet. If some lines begin with ``$``, the others are what these print."""
        prompted = re.search(r"^\$ ", self.code, re.MULTILINE) is not None
        found: list[Command] = []
        for number, line in enumerate(self.code.splitlines(), self.line):
            if prompted and not line.startswith("$ "):
                last = found.pop()
                found.append(Command(self.page, last.line, last.text, f"{last.shown}{line}\n"))
            elif found and found[-1].text.endswith("\\"):
                last = found.pop()
                found.append(Command(self.page, last.line, f"{last.text[:-1].rstrip()} {line.strip()}"))
            elif text := re.sub(r"\s+# .*|^# .*", "", line.removeprefix("$ ")).strip():
                found.append(Command(self.page, number, text))
        return found


def snippets(root: Path = ROOT) -> list[Snippet]:
    """All of them, README.md first, each page from top to bottom."""
    found = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            indent, _, language, code = block.groups()
            line = text[: block.start(4)].count("\n") + 1
            code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
            found.append(Snippet(path.relative_to(root).as_posix(), line, language, code))
    return found
