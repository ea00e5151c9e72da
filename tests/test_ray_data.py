"""Ray Data on a file of prompts: nothing is lost or doubled, and no text differs."""

import json
from pathlib import Path

import pytest

import stree_jax as st
from tests.helpers import python

EXAMPLES = Path(__file__).parents[1] / "examples"
pytest.importorskip("ray", reason="ray, for examples/ray_data.py, is not installed")
NUM_PROMPTS, NUM_THERE = 400, 50
HOW = {"max_new_tokens": 4, "temperature": 0.8, "rows": 8, "seed": 3}
# The first worker cannot start; one dies in the middle.
DRIVER = """
import json, os, pathlib, signal, sys
import ray, ray_data

def first(name):
    try:
        pathlib.Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

class Worker(ray_data.Decoder):
    def __init__(self, refused, killed, **arguments):
        if first(refused):
            raise RuntimeError("no device today")
        super().__init__(**arguments)
        self._killed, self._calls = killed, 0

    def __call__(self, batch):
        found = super().__call__(batch)
        self._calls += 1
        if self._calls == 3 and first(self._killed):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

ray.init(num_cpus=3, include_dashboard=False)
prompts, output, arguments = sys.argv[1:]
paths = map(pathlib.Path, (prompts, output))
ray_data.decode(*paths, worker=Worker, batch_size=32, **json.loads(arguments))
"""


@pytest.mark.thorough
def test_a_worker_that_dies_and_one_that_does_not_start(tmp_path):
    prompts, one, output = (tmp_path / name for name in ("in.jsonl", "one.jsonl", "out.jsonl"))
    texts = ["Ann has 3 pens. " * (i % 3) + f"There are {i}" for i in range(NUM_PROMPTS)]
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    models = st.demo_path("target"), st.demo_path("draft")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in HOW.items()]
    command = ["generate", models[0], "--draft", models[1], "--prompts", prompts, "--output", one]
    python("-m", "stree_jax", *command, *options)
    want = [json.loads(line) for line in one.read_text().splitlines()]
    there = [{"number": each["line"], "text": each["text"], "old": True} for each in want]
    kept = "".join(json.dumps(each) + "\n" for each in there[:NUM_THERE])
    output.write_text(kept + '{"number": 51, "te')  # a run was interrupted
    faults = {name: tmp_path / name for name in ("refused", "killed")}
    paths = {"target": models[0], "draft": models[1], **faults}
    arguments = json.dumps(HOW | {name: str(path) for name, path in paths.items()})
    path = f"{EXAMPLES.parent}:{EXAMPLES}"
    python(
        *("-c", DRIVER, prompts, output, arguments),
        PYTHONPATH=path,
        RAY_USAGE_STATS_ENABLED="0",
    )
    assert all(fault.exists() for fault in faults.values())
    got = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["number"] for each in got if each.get("old")] == [*range(1, NUM_THERE + 1)]
    assert sorted(each["number"] for each in got) == [*range(1, NUM_PROMPTS + 1)]
    for each in got:
        assert each["text"] == want[each["number"] - 1]["text"]
