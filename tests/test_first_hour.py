"""A stranger's first hour: README and docs/start.md to the letter, in a clone with a fresh install.

The blocks come from the pages. A page's commands run in their order in the clone, and then its
Python in one session there, as a reader pastes it.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import fences

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/start.md")
# What a block needs beyond the clone. Without a network the test is skipped there.
NETWORK = {"pip install .": "downloads the dependencies"}
# The names that docs/start.md has for "your checkpoint": links in the clone.
CHECKPOINTS = {"TARGET": "stree_jax/demo/target", "DRAFT": "stree_jax/demo/draft"}
COMMAND = re.compile(r"(pip|stree-jax|python3?|make|git) ")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the tests run without a checkout"),
]


def blocks(page):
    """Language and text of each block of a page; pictures are none, and the clone is there."""
    for language, text in fences(page):
        block = re.sub(r"^git clone .*\n", "", text)
        if language == "python":
            yield "python", block
        elif language == "sh" or all(map(COMMAND.match, block.splitlines())):
            yield "sh", block


def run(command, folder, environment, **options):
    """Output of a command that succeeds."""
    options |= dict(cwd=folder, env=environment, text=True, timeout=3600)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options
    )
    needs = [reason for start, reason in NETWORK.items() if start in str(command)]
    if done.returncode and needs and "connection" in done.stdout.lower():
        pytest.skip(f"no network, and this {needs[0]}: {command}")
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def test_the_pages_are_true_to_the_letter(tmp_path):
    clone, venv = tmp_path / "stree-jax", tmp_path / "venv"
    mine = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    mine |= {"PATH": f"{venv / 'bin'}:{mine['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    mine = {n: v for n, v in mine.items() if n not in ("STREE_JAX_CACHE", "XLA_FLAGS")}
    do = functools.partial(run, environment=mine)
    do(["git", "clone", "--quiet", str(ROOT), str(clone)], tmp_path)
    do([sys.executable, "-m", "venv", str(venv)], tmp_path)
    for name, checkpoint in CHECKPOINTS.items():
        (clone / name).symlink_to(checkpoint)
    for page in PAGES:
        found = [*blocks(clone / page)]
        assert {kind for kind, _ in found} == {"python", "sh"}
        for kind, block in found:
            if kind == "sh":
                shown = do(["sh", "-e", "-c", block], clone)
                assert "stree-jax demo" not in block or re.search(r"\byes\b", shown), shown
        session = "\n".join(block for kind, block in found if kind == "python")
        do(["python"], clone, input=session)
    assert (clone / "tree.json").is_file()
    assert do(["git", "status", "--porcelain"], clone).split("\n") == [
        *(f"?? {name}" for name in sorted(["DRAFT", "TARGET", "tree.json"])),
        "",
    ]
