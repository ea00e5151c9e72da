"""Every page is true: its code runs, its commands exist, its pictures are those of the results."""

import re
import shlex
from pathlib import Path

import pytest
import typer

import pallas_kernels
import stree_jax as st
from stree_jax.cli.main import app
from stree_jax.convert import FAMILIES
from stree_jax.heads import HEADS
from tests.helpers import DOCS, fences, python_blocks

ROOT = Path(__file__).parents[1]
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
pytestmark = pytest.mark.skipif(not PAGES, reason="the tests run without a checkout")


def name_of(page):
    return str(page.relative_to(ROOT))


# docs/sharding.md needs 4 devices: tests/sharding/decoding_on_8_devices.py runs it.
HERE = [page for page in PAGES if python_blocks(page) and page.stem != "sharding"]


@pytest.mark.docs
@pytest.mark.parametrize("page", HERE, ids=name_of)
def test_the_code_runs(page, tiny_pair, monkeypatch):
    """All blocks of a page, in order, with tiny models in the place of the embedded ones."""
    monkeypatch.setattr(st, "demo_path", tiny_pair.joinpath)
    before = dict(FAMILIES)
    names = {"__name__": page.stem}
    try:
        for reason, code in python_blocks(page):
            assert not reason or "download" in reason or "home folder" in reason
            if not reason:
                exec(compile(code, page.name, "exec"), names)
    finally:
        FAMILIES.clear()
        FAMILIES.update(before)


def commands(page):
    """Lines of shell blocks, and commands in the text: the words of each, and if it is whole."""
    for language, block in fences(page):
        if language in ("", "sh", "toml"):
            for line in block.replace("\\\n", " ").splitlines():
                yield from found_in(line, True)
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
        yield from found_in(line, True)
    for code in re.findall(r"`([^`]+)`", text):
        yield from found_in(code, False)


def found_in(line, is_whole):
    if re.match(r"\s*(stree-jax|python3? -m benchmarks\.)", line):
        yield shlex.split(line, comments=True), is_whole


def check_command(words, is_whole):
    """`stree-jax`: by its own parser if the command is whole, else by its names of options."""
    group = typer.main.get_command(app)
    group_context = group.make_context("stree-jax", ["tree"])
    if "|" in words:  # a list of commands
        words = [word for word in words if word[0] not in "|-"]
        assert set(words[1:]) <= set(group.commands), words
        return
    if len(words) == 1:
        return
    assert words[1] in group.commands, words
    command = group.commands[words[1]]
    if is_whole:
        command.make_context(words[1], words[2:], parent=group_context)
    options = {"--help"} | {option for each in command.params for option in each.opts}
    assert {word for word in words if re.match("--?[a-z]", word)} <= options, words


def check_benchmark(words):
    folder = ROOT / "benchmarks"
    module = folder.joinpath(*words[2].split(".")[1:])
    assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words
    sources = "".join(file.read_text() for file in folder.rglob("*.py"))
    for word in words[3:]:
        assert not word.startswith("--") or f'"{word}"' in sources, words


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_the_commands_exist(page):
    for words, is_whole in commands(page):
        if words[0] == "stree-jax":
            check_command(words, is_whole)
        else:
            check_benchmark(words)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", page.read_text()):
        assert f"\n{target}:" in makefile, target


def test_the_reference_is_complete():
    """Every public name has its entry, and every entry is public."""
    named = r"(?m)^\.\. (?:autofunction|autoclass|autoexception|py:data):: (\w+)$"
    listed = re.findall(named, page := (DOCS / "api/stree_jax.md").read_text())
    assert "\n.. heads\n" in page  # conf.py puts their names there
    listed += [name for room in HEADS.values() for name in room.names]
    assert sorted([*listed, "convert", "reasoning", "testing", "training"]) == sorted(st.__all__)
    listed = re.findall(named, (DOCS / "api/reasoning.md").read_text())
    assert sorted(listed) == sorted(st.reasoning.__all__)
    listed = re.findall(named, (DOCS / "api/pallas_kernels.md").read_text())
    assert sorted([*listed, "dispatch"]) == sorted(pallas_kernels.__all__)


def test_every_name_of_the_library_exists():
    for page in TEXTS:
        for path in re.findall(r"\bst((?:\.[A-Za-z]\w*)+)", page.read_text()):
            found = st
            for name in path[1:].split("."):
                assert hasattr(found, name), f"{page.name}: st{path}"
                found = getattr(found, name)


def test_every_example_is_in_the_gallery():
    shown = re.findall(r"\{literalinclude\} \.\./(\S+)", (DOCS / "examples.md").read_text())
    assert sorted(shown) == sorted(f"examples/{f.name}" for f in (ROOT / "examples").glob("*.py"))


def test_what_to_expect_was_measured():
    """Its factors are in the record; a new result changes both pages."""
    expected, record = ((DOCS / f"{page}.md").read_text() for page in ("expect", "results"))
    assert {*re.findall(r"\d+\.\d\dx", expected)} <= {*re.findall(r"\d+\.\d\dx", record)}


def test_the_results_are_those_that_pages_name():
    """A file that is gone is named with its commit."""
    here = {file.name for file in (ROOT / "benchmarks/results").glob("*.json")}
    named = {"steps.json"}  # which is drawn
    for page in PAGES:
        text = " ".join(page.read_text().split())
        named.update(re.findall(r"benchmarks/results/([\w-]+\.json)", text))
        if page.stem in ("results", "record"):
            named.update(re.findall(r"`([\w-]+\.json)`(?! (?:and `[^`]+` )?in commit)", text))
    assert named == here


def test_links_between_pages():
    """Also those that the README and the changelog have; the site checks headings."""
    for page in [*TEXTS, ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)


def test_the_pictures_are_those_of_the_results():
    """After new results: `python -m benchmarks.pictures --commit`."""
    pictures = pytest.importorskip("benchmarks.pictures", reason="matplotlib is not installed")
    drawn = {name: pictures.svg(figure) for name, figure in pictures.figures().items()}
    committed = {file.stem for file in pictures.PICTURES.glob("*.svg")}
    assert committed == {*drawn, "profile"}  # that is of docs/draw_profile.py
    for name, svg in drawn.items():
        committed = (pictures.PICTURES / f"{name}.svg").read_text()
        if f"Matplotlib v{pictures.matplotlib.__version__}," in committed:
            assert svg == committed, name
        else:  # another version places and writes things differently, but says the same
            assert re.findall(">(.+)</text>", svg) == re.findall(">(.+)</text>", committed), name
