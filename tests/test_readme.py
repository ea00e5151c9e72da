"""The README's code runs, its picture is a real step, its table the measured one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stree_jax as st
from stree_jax.convert import FAMILIES
from tests.decoding.texts import steps
from tests.helpers import fences

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(path, language):
    return [block for name, block in fences(path) if name == language]


def test_the_code_blocks(capsys):
    names, printed = {}, []
    for code in blocks(README, "python"):
        exec(compile(code, str(README), "exec"), names)
        printed.append(capsys.readouterr().out)
    assert re.match(r"\d\.\d\d tokens per target call\n.", printed[0])
    assert blocks(README, "text") == printed[:1]


def test_whom_transformers_refuses_to_draft_for():
    """As its sources mark models; the README has a name for each of ours that it does not."""
    folder = Path(pytest.importorskip("transformers").__file__).parent / "models"
    sources = {name: folder / name / f"modeling_{name}.py" for name in FAMILIES}
    drafts = {
        name
        for name, file in sources.items()
        if file.is_file() and "_is_stateful = True" not in file.read_text()
    }
    assert drafts == {"lfm2", "lfm2_moe", "lfm3"}
    text = " ".join(README.read_text().split())
    assert "refuses to draft for models with Mamba-2 or gated delta layers" in text
    assert "it drafts only for LFM2 and LFM3" in text


@pytest.mark.thorough
@pytest.mark.skipif(not (ROOT / "convert").is_dir(), reason="the tests run without a checkout")
def test_a_checkout_needs_no_install_of_its_own():
    """Python in the clone imports its `stree_jax/`, whatever is installed: here, nothing is."""
    code = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
from stree_jax import convert
import stree_jax.convert.files
print(convert.__file__)
"""
    commands = {("-c", code): str(ROOT / "convert"), ("-m", "stree_jax", "--help"): "Usage:"}
    for command, printed in commands.items():
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, check=True, capture_output=True, text=True
        )
        assert printed in done.stdout


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the tests run without a checkout")
def test_the_picture_is_a_step_of_the_embedded_models():
    """The picture is drawn from `steps.json`; the text beside it has its words."""
    drawn = json.loads((ROOT / "benchmarks/results/steps.json").read_text())["steps"]
    target, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    prompts = [tokenizer.encode("Question: Ann has 3 pens.").ids]
    options = dict(prompts=prompts, max_new_tokens=48, drafter=st.ModelDrafter(draft))
    found, tree = [], st.TreeTopology.default()
    for _, drafted, verdict, _ in steps(target, count=len(drawn), topology=tree, **options):
        labels = [tokenizer.decode([int(token)]) for token in drafted.tokens[0]]
        path = tree.ancestor_mask[verdict.last[0]].nonzero()[0].tolist()
        next_token = tokenizer.decode([int(verdict.next_token[0])])
        found.append(dict(parents=[*tree.parents], labels=labels, path=path, next=next_token))
    assert found == drawn
    step = drawn[5]  # `README_STEP` of benchmarks/pictures.py
    words, text = step["labels"], README.read_text()
    assert f"rejects the first guess, `{words[1]}{words[3]}{words[4]}`." in text
    assert f"second guess, `{words[step['path'][1]]}`, and adds `{step['next']}`" in text


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the tests run without a checkout")
def test_the_table_is_the_measured_one():
    """Tokens a second of each row and type are in `peer-cpu.json`."""
    found = json.loads((ROOT / "benchmarks/results/peer-cpu.json").read_text())
    measured = {
        (row["method"], row["temperature"]): f"{row['tokens_per_second']['median']:,.0f}"
        for row in found["methods"]
    }
    names = {"llama.cpp, its own drafts": "llama.cpp, chain of 4"}
    rows = re.findall(r"^\| (\w.+?) \|(.*\d.*)\|$", README.read_text(), re.MULTILINE)
    assert len(rows) == 7
    for name, cells in rows:
        method = names.get(name, name.removeprefix("here, "))
        for kind, cell in zip(
            ("", ", bfloat16", ", 8 bits", ", 4 bits"), cells.split("|"), strict=True
        ):
            for temperature, speed in enumerate(filter(None, cell.strip().split(" / "))):
                assert speed == measured[method + kind, temperature], (name, kind, temperature)
