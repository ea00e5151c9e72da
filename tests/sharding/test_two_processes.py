"""Two processes with gloo, on this machine."""

import concurrent.futures
import json
import os
import re
import socket

import numpy as np
import pytest

import stree_jax as st
from stree_jax.testing import perturbed, random_model
from tests.helpers import assert_same_model, crcs, python
from tests.sharding.configs import CONFIGS
from tests.sharding.two_processes import MESHES, served_hybrid, texts

LIMIT = 1200  # seconds, also of one whose other has failed


def free_port():
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        return opened.getsockname()[1]


def run_two(arguments, **environment):
    """Runs Python with `arguments(process)` twice; returns what both wrote."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    inner = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    inner |= {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"} | environment

    def run(process):
        shown = python(*arguments(process), timeout=LIMIT, JAX_PROCESS_ID=str(process), **inner)
        return re.sub(r"\[Gloo\].*\n", "", shown)  # which says hello on stdout

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return [*pool.map(run, range(2))]


@pytest.mark.slow
def test_two_processes_are_one_device(tmp_path):
    target = random_model(CONFIGS["one layer"])
    draft = perturbed(target, 0.1)
    st.save_pretrained(target, tmp_path / "target")
    st.save_pretrained(draft, tmp_path / "draft")
    port = free_port()

    module = ("-m", "tests.sharding.two_processes")
    shown = run_two(lambda process: (*module, process, port, tmp_path))
    outputs = [json.loads(text.splitlines()[-1]) for text in shown]
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
    for name in ("target", "saved 2x2", "saved 1x4", "saved whole"):
        assert crcs(tmp_path / name) == crcs(tmp_path / "target")
        assert_same_model(st.from_pretrained(tmp_path / name).in_first(), target)
    assert (tmp_path / "saved 2x2" / "README.md").read_text() == "of 0"
    assert not [*tmp_path.glob(".*")]  # nothing is left of the refused one


@pytest.mark.slow
def test_the_command():
    """With the embedded models."""
    demo, text = st.demo_path("target"), "Once upon a time"
    command = ["-c", "from stree_jax.cli.main import main; main()", "generate", demo, "-p", text]
    command += ["--draft", st.demo_path("draft"), "--mesh", "data=2,model=2", "--distributed"]
    first, second = run_two(
        lambda process: [*command, "--max-new-tokens", 8],
        JAX_COORDINATOR_ADDRESS=f"localhost:{free_port()}",
        JAX_NUM_PROCESSES="2",
        STREE_JAX_CACHE="off",
    )
    tokenizer = st.load_tokenizer(demo)
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    out = st.generate(st.from_pretrained(demo), [prompt], max_new_tokens=8)
    text += tokenizer.decode(out.tokens[0, : out.lengths[0]].tolist())
    assert first.splitlines()[0] == text.splitlines()[0]
    assert "8 tokens, " in first
    assert "tokens" not in second
    assert np.all(out.lengths == 8)
