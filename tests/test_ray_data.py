"""Ray Data on a file of prompts: nothing is lost or doubled, and no text differs."""

import json
from pathlib import Path

import pytest

import stree_jax as st
from tests.helpers import python

pytest.importorskip("ray", reason="ray, for examples/ray_data.py, is not installed")
EXAMPLES = Path(__file__).parents[1] / "examples"
HOW = {"max_new_tokens": 4, "temperature": 0.8, "rows": 8, "seed": 3}
# The first worker cannot start; one dies in the middle.
DRIVER = """
import json, os, pathlib, signal, sys
import ray, ray_data

def is_first(file):
    there = os.path.exists(file)
    pathlib.Path(file).touch()
    return not there

class Worker(ray_data.Decoder):
    def __init__(self, refused, killed, **arguments):
        if is_first(refused):
            raise RuntimeError("no device today")
        super().__init__(**arguments)
        self._killed, self._calls = killed, 0

    def __call__(self, batch):
        found = super().__call__(batch)
        self._calls += 1
        if self._calls == 3 and is_first(self._killed):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

ray.init(num_cpus=3, include_dashboard=False)
prompts, output, arguments = sys.argv[1:]
paths = map(pathlib.Path, (prompts, output))
sys.exit(ray_data.decode(*paths, worker=Worker, batch_size=32, **json.loads(arguments)))
"""


@pytest.mark.thorough
def test_a_worker_that_dies_and_one_that_does_not_start(tmp_path):
    """In a run that goes on after one that was interrupted; lines are those of the command."""
    prompts, one, output, *faults = map(tmp_path.joinpath, ("in", "one", "out", "refuse", "kill"))
    texts = ["Ann has 3 pens. " * (i % 3) + f"There are {i}" for i in range(396)]
    lines = [json.dumps({"prompt": text}) for text in texts]
    lines += [
        json.dumps({"prompt": "Ann", **own}) for own in ({"n": 2}, {"number": 7}, {"seed": 5})
    ]
    prompts.write_text("\n".join([*lines, "no JSON\r"]))
    models = {name: str(st.demo_path(name)) for name in ("target", "draft")}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in HOW.items()]
    command = ["generate", models["target"], "--draft", models["draft"], *options]
    python("-m", "stree_jax", *command, "--prompts", prompts, "--output", one, code=1)
    want = [json.loads(line) for line in one.read_text().splitlines()]
    there = [json.dumps(record | {"old": 1}) for record in want[:50]]
    output.write_text("\n".join([*there, '{"line": 51, "te']))
    arguments = HOW | models | {"refused": str(faults[0]), "killed": str(faults[1])}
    path = f"{EXAMPLES.parent}:{EXAMPLES}"
    python("-c", DRIVER, prompts, output, json.dumps(arguments), PYTHONPATH=path, code=1)
    assert all(fault.exists() for fault in faults)
    got = [json.loads(line) for line in output.read_text().splitlines()]
    assert sum(record.pop("old", 0) for record in got) == 50
    assert sorted(got, key=lambda record: record["line"]) == want
    assert [record["line"] for record in want if "error" in record] == [400]
