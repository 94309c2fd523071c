"""The documentation is correct: its programs run, and the paths in it exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from megatron_tape.position import ENCODINGS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SITE = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
hooks = importlib.util.module_from_spec(SITE)
SITE.loader.exec_module(hooks)
PROGRAMS = [
    pytest.param(program, id=f"{page.name}-{i}")
    for page in PAGES
    for i, program in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    )
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_in_the_documentation_runs(program, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_tape.position.ENCODINGS", dict(ENCODINGS))
    exec(compile(program, "documentation", "exec"), {"__name__": "documentation"})


def test_there_are_programs():
    assert len(PROGRAMS) >= 2


def test_the_map_lists_all_packages_and_only_existing_paths():
    text = (ROOT / "docs" / "code-map.md").read_text(encoding="utf-8")
    table, _, tree = text.partition("## The tree")
    named = []
    for indent, rest in re.findall(r"^    ( *)(\S.*)$", tree, re.M):
        folder = ROOT / "megatron_tape" if indent else ROOT
        named += [folder / place for place in re.split(r"\s{2,}", rest)[0].split()]
    assert [place for place in named if not place.exists()] == []
    packages = {path.parent for path in (ROOT / "megatron_tape").glob("*/__init__.py")}
    assert packages <= set(named)

    paths = re.findall(r"`([\w/]+(?:/|\.\w+))`", table)
    folders = (ROOT, ROOT / "megatron_tape")
    assert len(paths) > 50
    assert [path for path in paths if not any((above / path).exists() for above in folders)] == []


def test_every_recipe_of_an_extension_is_listed():
    page = (ROOT / "docs" / "extension.md").read_text(encoding="utf-8")
    recipes = (ROOT / "pretrain" / "recipes" / "extend").glob("*.yaml")
    assert [path.stem for path in recipes if f"`{path.stem}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    paths = re.findall(r"`((?:megatron_tape|pretrain|slurm|tests|benchmarks|docs)/[\w./-]+)`", text)
    targets = [(page.parent / link).resolve() for link in links] + [ROOT / path for path in paths]
    generated = {ROOT / "docs" / path for path in hooks.GENERATED}
    assert [path for path in targets if not path.exists() and path not in generated] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_begin_after_an_empty_line(page):
    """The site shows them as part of the paragraph otherwise."""
    text = re.sub(
        r"^```.*?^```",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.M | re.S,
    )
    assert re.findall(r"^(?![-|] |  |\d+\. ).+\n(?:- |1\. ).*$", text, re.M) == []


def words(page):
    return len(page.read_text(encoding="utf-8").split())


def test_the_documentation_stays_short():
    """The appendix of the research log may be longer, and the reference is generated."""
    docs = [page for page in PAGES[1:] if page.parent.name != "reproductions"]
    assert words(ROOT / "README.md") <= 1200
    assert {page.name: words(page) for page in docs if words(page) > 1500} == {}
    assert sum(map(words, docs)) <= 24_000
