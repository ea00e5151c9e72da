"""Two processes with gloo, on this machine."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.testing import perturbed, random_model
from tests.sharding.configs import CONFIGS
from tests.sharding.two_processes import MESHES, served_hybrid, texts

LIMIT = 1200  # seconds; then both processes are ended


def free_port():
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        return opened.getsockname()[1]


def run_two(command, tmp_path, **environment):
    """Runs `command(process)` twice; returns what both wrote."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    inner = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    inner |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    inner |= {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"} | environment
    files = [(tmp_path / f"out{i}").open("w+") for i in range(2)]
    both = [
        subprocess.Popen(
            command(process),
            env=inner | {"JAX_PROCESS_ID": str(process)},
            cwd=Path(__file__).parents[2],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process, file in enumerate(files)
    ]
    try:
        end = time.monotonic() + LIMIT
        while any(process.poll() is None for process in both) and time.monotonic() < end:
            if any(process.poll() not in (None, 0) for process in both):
                break  # the other one would wait for it
            time.sleep(0.2)
    finally:
        for process in both:
            process.kill()
            process.wait()
    texts = []
    for file in files:
        file.seek(0)
        texts.append(re.sub(r"\[Gloo\].*\n", "", file.read()))  # which says hello on stdout
        file.close()
    assert [process.returncode for process in both] == [0, 0], "\n".join(texts)[-10_000:]
    return texts


@pytest.mark.slow
def test_two_processes_are_one_device(tmp_path):
    target = random_model(CONFIGS["one layer"])
    draft = perturbed(target, 0.1)
    st.save_pretrained(target, tmp_path / "target")
    st.save_pretrained(draft, tmp_path / "draft")
    port = free_port()

    def command(process):
        module = [sys.executable, "-m", "tests.sharding.two_processes"]
        return [*module, str(process), str(port), str(tmp_path)]

    outputs = [json.loads(text.splitlines()[-1]) for text in run_two(command, tmp_path)]
    want = texts(target, draft) | {"hybrid": served_hybrid()}
    assert max(want["calls"]) < 10  # drafts are accepted
    for found in outputs:
        for data, model in MESHES:
            assert found[f"{data}x{model}"] == want
        assert found["back"] == want["greedy"]
        assert "there are 4 in 2 processes" in found["refused"]["some devices"]
        assert "several processes cannot save to" in found["refused"]["a pattern"]
    first, second = (found["refused"]["save"] for found in outputs)
    assert "exists; choose another name" in first
    assert second == f"in process 0: {first}"
    sums = {
        name: json.loads((tmp_path / name / "checksums.json").read_text())["crc32"]
        for name in ("target", "saved 2x2", "saved 1x4", "saved whole")
    }
    for name, found in sums.items():
        assert found == sums["target"]
        saved = st.from_pretrained(tmp_path / name).in_first()
        jax.tree.map(np.testing.assert_array_equal, nnx.state(saved), nnx.state(target))
    assert (tmp_path / "saved 2x2" / "README.md").read_text() == "of 0"
    assert not [*tmp_path.glob(".*")]  # nothing is left of the refused one


START = [sys.executable, "-c", "from stree_jax.cli.main import main; main()", "generate"]


def generate_in_two(folder, *arguments):
    """Runs the command with the embedded models; returns what both processes wrote."""
    models = [str(st.demo_path("target")), "--draft", str(st.demo_path("draft"))]
    mesh = ["--mesh", "data=2,model=2", "--distributed"]
    return run_two(
        lambda process: [*START, *models, *mesh, *arguments],
        folder,
        JAX_COORDINATOR_ADDRESS=f"localhost:{free_port()}",
        JAX_NUM_PROCESSES="2",
        STREE_JAX_CACHE="off",
    )


@pytest.mark.slow
def test_the_command(tmp_path):
    arguments = ["-p", "Once upon a time", "--max-new-tokens", "8"]
    demo = str(st.demo_path("target"))
    first, second = generate_in_two(tmp_path, *arguments)
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    prompt = tokenizer.encode(arguments[1], add_special_tokens=False).ids
    out = st.generate(st.from_pretrained(demo), [prompt], max_new_tokens=8)
    text = tokenizer.decode(out.tokens[0, : out.lengths[0]].tolist())
    assert first.splitlines()[0] == arguments[1] + text.splitlines()[0]
    assert "8 tokens, " in first
    assert "tokens" not in second
    assert np.all(out.lengths == 8)
