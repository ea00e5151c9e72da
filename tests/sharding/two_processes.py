"""One of two processes; `test_two_processes.py` starts both.

    python -m tests.sharding.two_processes PROCESS PORT FOLDER

FOLDER has the checkpoints "target" and "draft". Prints a line of JSON.
"""

import json
import os
import sys
from pathlib import Path

import jax
import pytest

import stree_jax as st
from stree_jax.testing import perturbed, random_model
from tests.decoding.texts import of_rows
from tests.sharding.configs import CONFIGS
from tests.sharding.meshes import PROMPTS

MESHES = ((2, 2), (1, 4))
HYBRID = "bamba"


def texts(target, draft):
    """Texts that all processes ask for alike; on one device they are the same."""
    greedy = dict(max_new_tokens=10, drafter=st.ModelDrafter(draft))
    greedy["topology"] = st.TreeTopology.from_branching((2, 1))
    sampled = greedy | dict(temperature=0.8, key=jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), 3)

    def generated(prompts, **options):
        return st.generate(target, prompts, **options).tokens.tolist()

    def streamed(prompts, **options):
        pieces = [*st.stream(target, prompts, **options)]
        return [of_rows(pieces, row) for row in range(len(prompts))]

    out = st.generate(target, PROMPTS, **greedy)
    return {
        "greedy": out.tokens.tolist(),
        "calls": out.stats.target_calls_per_row.tolist(),
        "sampled": generated(PROMPTS, **sampled),
        "keys": generated(PROMPTS, **sampled | dict(key=keys)),
        "streamed": streamed(PROMPTS, max_new_tokens=3),
        "served": served(target, sampled),
    }


def served(target, options):
    """The texts of a scheduler: one is cancelled, one goes on, and two share a prefix."""
    text = {name: options[name] for name in ("max_new_tokens", "temperature", "key")}
    drafts = {name: options[name] for name in ("drafter", "topology")}
    sizes = dict(rows=2, max_length=64, quantum=2, prefix_cache_bytes=10**7)
    scheduler = st.Scheduler(target, **sizes, **drafts)
    stem = scheduler.read(PROMPTS[0])
    requests = [st.Request(prompt, keep=True, **text) for prompt in PROMPTS]
    requests.append(st.Request([], after=stem, **text))
    requests.append(st.Request([4, 5], max_new_tokens=40))
    ids = [scheduler.submit(request) for request in requests]
    done, texts = {}, {}
    for request_id, new, reason in scheduler.events():
        texts[request_id] = texts.get(request_id, []) + new
        if reason is not None:
            done[request_id] = scheduler.pop(request_id)
        if request_id == ids[4] and reason is None and len(texts[request_id]) > 6:
            scheduler.cancel(request_id)
        if request_id == ids[0] and reason is not None:
            after = done[request_id].prefix
            ids.append(scheduler.submit(st.Request([7, 8], after=after, max_new_tokens=5)))
    assert all(done[i].tokens == texts[i] for i in ids)
    assert scheduler.prefix_cache_stats.tokens_reused >= len(PROMPTS[0])
    assert [done[i].finish_reason for i in ids] == [*["length"] * 4, "cancelled", "length"]
    return [texts[i] for i in ids]


def served_hybrid(mesh=None):
    """Texts of a hybrid."""
    target = random_model(CONFIGS[HYBRID])
    draft = st.ModelDrafter(st.shard(perturbed(target, 0.1), mesh, replicate=mesh is not None))
    sizes = dict(rows=2, max_length=150, quantum=2, prefix_cache_bytes=10**7)
    scheduler = st.Scheduler(st.shard(target, mesh), drafter=draft, **sizes)
    text = dict(max_new_tokens=10, temperature=0.8)
    for i, prompt in enumerate([*PROMPTS, [1, 2, 3] * 30]):
        scheduler.submit(st.Request(prompt, key=i, **text))
    done = sorted(scheduler.completions(), key=lambda completion: completion.request_id)
    return [completion.tokens for completion in done]


def refusals(target, folder):
    """The messages of calls that are refused in both processes."""
    calls = {
        "save": lambda: st.save_pretrained(target, folder / "saved 1x4"),
        "a pattern": lambda: st.save_pretrained(target, folder / "[1]" / "model"),
        "some devices": lambda: st.make_mesh(data=2),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        found[name] = str(error.value)
    return found


def main():
    process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    found = {}
    # Along "data" each process has a row of the mesh; along "model" half of all layers.
    for data, model in MESHES:
        mesh, name = st.make_mesh(data=data, model=model), f"{data}x{model}"
        target = st.from_pretrained(folder / "target", mesh=mesh)
        draft = st.from_pretrained(folder / "draft", mesh=mesh, replicate=True)
        found[name] = texts(target, draft) | {"hybrid": served_hybrid(mesh)}
        st.save_pretrained(target, folder / f"saved {name}", model_card=f"of {process}")
    # Cut into four parts, of which each process has two.
    whole = st.shard(target, None)
    found["back"] = st.generate(whole, PROMPTS, max_new_tokens=10).tokens.tolist()
    st.save_pretrained(whole, folder / "saved whole")
    found["refused"] = refusals(target, folder)
    print(json.dumps(found), flush=True)  # noqa: T201
    os._exit(0)  # without the service's goodbye, which waits for the other process


if __name__ == "__main__":
    main()
