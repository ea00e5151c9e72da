"""The project's lines have a ceiling: who needs more finds them elsewhere, or raises it here."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lines of what git would track, by its patterns. A commit that removes some lowers the number.
CEILINGS = {
    "stree_jax/*.py": 24_999,
    "pallas_kernels/*.py": 7_394,
    "convert/*.py": 5_896,
    "tests/*.py": 26_000,
    "benchmarks/*.py": 4_805,
    "*.cc *.h": 2_899,
    "benchmarks/results": 11_407,
}


def lines(patterns):
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listed = subprocess.run(
        [*command, *patterns.split()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = map(ROOT.joinpath, filter(None, listed.stdout.split("\0")))
    return sum(file.read_bytes().count(b"\n") for file in files if file.is_file())


@pytest.mark.skipif(
    not ((ROOT / ".git").exists() and shutil.which("git")), reason="this is no clone"
)
def test_no_folder_is_larger_than_its_ceiling():
    now = {patterns: lines(patterns) for patterns in CEILINGS}
    rows = [
        f"{patterns:20}{ceiling:10,}{now[patterns]:10,}{now[patterns] - ceiling:+12,}"
        for patterns, ceiling in CEILINGS.items()
    ]
    heads = "\n{:20}{:>10}{:>10}{:>12}\n".format("lines", "ceiling", "now", "difference")
    assert all(now[each] <= CEILINGS[each] for each in CEILINGS), heads + "\n".join(rows)
