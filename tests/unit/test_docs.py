"""The pages: links and anchors lead somewhere, the navigation lists every page, snippets are at least well-formed."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest
import yaml
from snippet_readers import NOT_RUN, USES, Use, stale
from snippets import FENCE, LANGUAGES, Snippet, snippets

from tide_strategies.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: Pages of the repository beside the site.
BESIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
ALL = [*PAGES, *BESIDE]

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """The text without blocks of code and code in lines, where brackets are no links."""
    return re.sub(r"(?<!\[)`[^`\n]*`(?!\])", "", FENCE.sub("", text))


def anchors(text: str) -> list[str]:
    """Anchors of the headings, as GitHub and MkDocs both make them."""
    found = []
    for heading in re.findall(r"^#{1,6} +(.*?) *$", FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.append(re.sub(r"[^\w\s-]", "", words).strip().replace(" ", "-"))
    return found


def broken(page: Path, text: str, root: Path = ROOT) -> list[str]:
    """What is wrong with the links of a page, in words."""
    problems = []
    for target in LINK.findall(prose(text)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists():
            problems.append(f"{target}: there is no {name}")
        elif page.is_relative_to(root / "docs") and not other.is_relative_to(root / "docs"):
            problems.append(f"{target}: outside of docs/, where the site cannot lead; name the file as code instead")
        elif anchor and other.suffix == ".md":
            there = anchors(text if other == page else other.read_text())
            if there.count(anchor) != 1:
                problems.append(f"{target}: no heading, or more than one, has the anchor {anchor}; there are {there}")
    return problems


@pytest.mark.parametrize("page", ALL, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


@pytest.mark.parametrize("page", ALL, ids=relative)
def test_anchors_are_the_same_on_github_and_on_the_site(page: Path) -> None:
    """MkDocs makes one hyphen of several; such headings could not be linked to from both."""
    linked = {t.partition("#")[2] for p in ALL for t in LINK.findall(prose(p.read_text())) if "#" in t}
    assert [a for a in anchors(page.read_text()) if a in linked and "--" in a] == []


def test_a_broken_link_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page, other = tmp_path / "docs/page.md", tmp_path / "docs/other.md"
    other.write_text("# Other\n\n## Two words: `code`\n\n```\n# no heading\n```\n")
    (tmp_path / "outside.py").touch()
    page.touch()

    def problems(text: str) -> list[str]:
        return broken(page, text, tmp_path)

    assert problems("[a](other.md) [b](other.md#two-words-code) [c](https://x.y/z) `[d](nowhere)`") == []
    assert problems("# Here\n[a](#here)") == []
    assert len(problems("[a](nowhere.md)")) == 1
    assert len(problems("[`code`](nowhere.md)")) == 1
    assert len(problems("[a](other.md#two)")) == 1
    assert len(problems("[a](other.md#no-heading)")) == 1
    assert len(problems("[a](#here)")) == 1
    assert "outside of docs/" in problems("[a](../outside.py)")[0]


def listed(nav: object) -> list[str]:
    """Pages in the navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert not isinstance(parts, (str, type(None)))
    return [page for part in parts for page in listed(part)]  # type: ignore[attr-defined]


def test_the_navigation_lists_every_page_once() -> None:
    pages = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    for page in PAGES:
        name = page.relative_to(DOCS).as_posix()
        assert pages.count(name) == 1, (
            f"docs/{name} is {pages.count(name)} times in the nav of mkdocs.yml: list it once"
        )
    for name in pages:
        assert (DOCS / name).is_file(), f"the nav of mkdocs.yml lists {name}, but there is no docs/{name}: remove it"


def test_the_first_page_leads_to_every_door() -> None:
    start = (DOCS / "index.md").read_text()
    for door in ("lightning.md", "accelerate.md", "transformers.md", "hydra.md", "plain_pytorch.md"):
        assert f"]({door})" in start


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter"])
def test_a_picture_of_a_schedule_is_what_its_command_draws(
    collective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "how_it_works.md").read_text()
    (command,) = re.findall(rf"^tide (timeline {collective} .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    drawn = f"{collective}.svg"
    assert (tmp_path / drawn).read_text() == (DOCS / "pictures" / drawn).read_text(), f"draw it anew: tide {command}"


@pytest.mark.parametrize("page", ALL, ids=relative)
def test_snippets_are_well_formed(page: Path) -> None:
    text = page.read_text()
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text)), "a block does not end"
    for _, _, language, code in FENCE.findall(text):
        if language == "python":
            ast.parse(code)
        elif language in ("yaml", "yml"):
            yaml.safe_load(code)


def test_what_is_listed_about_snippets_is_true_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each snippet is run as written by tests/tools/run_snippets.py, the Python ones in tests/test_wheel.py."""
    found = snippets()
    assert {s.language for s in found} <= set(LANGUAGES), (
        "a language that the runner does not know: it would be left out"
    )
    assert stale(found) == []
    monkeypatch.setitem(USES, ("README.md", "no such text"), Use())
    monkeypatch.setitem(NOT_RUN, ("README.md", "make nothing"), "for this test")
    found += [Snippet("README.md", 1, "yaml", "a: 1\n"), Snippet("README.md", 2, "python", "...\n")]
    problems = stale(found)
    assert len(problems) == 4
    for text in (
        "'no such text' is in 0 snippets",
        "no command 'make nothing'",
        "README.md:1: YAML",
        "README.md:2: 1 lines",
    ):
        assert any(text in problem for problem in problems)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_page_begins_with_its_title_and_has_no_other(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_lists_and_tables_are_lists_and_tables_on_the_site(page: Path) -> None:
    """Python-Markdown wants an empty line before them, which GitHub does not."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"([*-]|1\.) ", line) and before and not re.match(r"\s|[*-] |\d+\. ", before):
            raise AssertionError(f"an empty line is missing before: {line}")
        if line.startswith("| ---"):
            assert before.startswith("|")
