"""Commands that are killed at random moments (kill -9): nothing is lost, nothing half-written.

The moments are those from when a command begins to write until it would end.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stree_jax as st
from stree_jax.convert.writing import write_as
from stree_jax.testing import random_model
from tests.helpers import assert_same_model
from tests.training.conftest import RECIPE, WORDS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
KILLS = 25


@pytest.fixture
def run(tmp_path):
    """Runs a command in the folder, and kills it seconds after files of a pattern changed.

    Returns how long it went on from then; None: it was killed.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "STREE_JAX_CACHE": str(tmp_path / "cache")}

    def sizes(pattern):
        with contextlib.suppress(OSError):  # some are gone again: the folder changes
            return {(file, file.stat().st_size) for file in tmp_path.glob(pattern)}

    def run(*arguments, begins="log", seconds=None):
        line = [sys.executable, "-m", "stree_jax", *map(str, arguments)]
        before, began = sizes(begins), None
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(line, cwd=tmp_path, stdout=log, stderr=log, env=environment)
        while process.poll() is None:
            if began is None and sizes(begins) != before:
                began = time.monotonic()
            if seconds is not None and began and time.monotonic() - began > seconds:
                process.kill()
                process.wait()
                return None
            time.sleep(0.003)
        assert process.returncode == 0, (tmp_path / "log").read_text()
        return time.monotonic() - (began or time.monotonic())

    return run


@pytest.fixture
def model(tmp_path):
    """A target with a tokenizer."""
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    config = st.ModelConfig.tiny(vocab_size=tokenizer.get_vocab_size(), num_layers=1)
    model = random_model(config)
    st.save_pretrained(model, tmp_path / "target", tokenizer=tokenizer)
    return model


def lines_of(file):
    """The records of an output, but for what stands behind its last whole line."""
    text = file.read_bytes() if file.exists() else b""
    records = map(json.loads, text[: text.rfind(b"\n") + 1].splitlines())
    return {record["line"]: record for record in records}


def test_texts_of_a_file(run, model, tmp_path):
    """After each kill all whole lines are there; a run goes on from them, to the same texts."""
    rng, lines = random.Random(0), [{"prompt": f"Once {i}", "n": 1 + i % 2} for i in range(300)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["generate", "target", "--prompts", "in.jsonl", "--rows", 4, "--max-new-tokens", 40]
    command += ["--temperature", 1, "--output"]
    run(*command, "whole.jsonl")
    span = run(*command, "again.jsonl", begins="again.jsonl")
    want, num_killed, rounds = lines_of(tmp_path / "whole.jsonl"), 0, 0
    assert len(want) == len(lines)
    while num_killed < KILLS:
        rounds += 1
        out, known = tmp_path / f"out-{rounds}.jsonl", {}
        while True:
            ended = run(*command, out.name, begins=out.name, seconds=rng.uniform(0, span / 5))
            found = lines_of(out)
            assert known.items() <= found.items()
            assert found.items() <= want.items()
            known = found
            if ended is not None:
                break
            num_killed += 1
        assert known == want


def leftovers(folder, name):
    return [path.name for path in folder.iterdir() if f".{name}.partial" in path.name]


def test_converted_to_8_bits(run, tmp_path):
    """The destination is absent or complete, and the next run leaves nothing else."""
    rng, config = random.Random(1), st.ModelConfig.tiny(vocab_size=20_000, d_model=256)
    (tmp_path / "hf").mkdir()
    write_as(random_model(config), tmp_path / "hf", "hf")
    command = ["convert", "hf"]
    run(*command, "whole", "--quantize", "int8")
    want = st.from_pretrained(tmp_path / "whole")
    span = run(*command, "again", "--quantize", "int8", begins=".again.partial*")
    num_there = 0
    for i in range(KILLS):
        out = tmp_path / f"out-{i}"
        seconds = rng.uniform(0, span)
        run(*command, out.name, "--quantize", "int8", begins=f".{out.name}.part*", seconds=seconds)
        if out.exists():
            num_there += 1
            assert_same_model(st.from_pretrained(out), want)
            continue
        if i % 5 == 0:
            run(*command, out.name, "--quantize", "int8")
            assert_same_model(st.from_pretrained(out), want)
            assert not leftovers(tmp_path, out.name)
    assert num_there < KILLS


def test_trained(run, tmp_path):
    """A run goes on from its last checkpoint, to the same weights."""
    rng = random.Random(2)
    words = [" ".join(rng.choices(WORDS, k=60)) for _ in range(200)]
    document = "".join(f"# {i}\n{each}\n" for i, each in enumerate(words))
    (tmp_path / "words.txt").write_text(document)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("steps = 6", "steps = 40"))
    run("train", "recipe.toml", "whole")
    span = run("train", "recipe.toml", "again", begins="again.run/steps/*")
    want, num_killed, rounds = st.from_pretrained(tmp_path / "whole"), 0, 0
    while num_killed < KILLS:
        rounds += 1
        out, saved = tmp_path / f"out-{rounds}", 0
        while True:
            begins, seconds = f"{out.name}.run/steps/*", rng.uniform(0, span / 5)
            ended = run("train", "recipe.toml", out.name, begins=begins, seconds=seconds)
            steps = [int(p.name) for p in Path(f"{out}.run").glob("steps/*") if p.name.isdecimal()]
            assert max(steps, default=0) >= saved
            saved = max(steps, default=0)
            if out.exists():
                assert_same_model(st.from_pretrained(out), want)
            if ended is not None:
                break
            num_killed += 1
        assert out.exists()
        assert not leftovers(tmp_path, out.name)


def test_measured(run, model, tmp_path):
    """The file is absent, or the content of one round, whole."""
    rng, num_there = random.Random(3), 0
    command = ["bench", "target", "--draft", "target", "--tree", "chain:2", "--tokens", 8]
    command += ["--rounds", 40, "--json"]
    span = run(*command, "whole.json", begins="whole.json*")
    for i in range(KILLS):
        out = tmp_path / f"out-{i}.json"
        run(*command, out.name, begins=f"{out.name}*", seconds=rng.uniform(0, span))
        if out.exists():
            num_there += 1
            assert json.loads(out.read_text())["rows"]
    assert num_there
