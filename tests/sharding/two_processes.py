"""One of two processes; `test_two_processes.py` starts both.

    python -m tests.sharding.two_processes PROCESS PORT FOLDER

FOLDER has the checkpoints "target" and "draft". Prints a line of JSON.
"""

import json
import os
import sys
from pathlib import Path

PROMPTS = [[5, 9, 2, 30, 11, 7, 7], [3], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
NEW_TOKENS = 10


def joined(steps, prompts):
    """The new tokens of each row."""
    assert all(len(step) == len(prompts) for step in steps)
    return [[token for step in steps for token in step[row]] for row in range(len(prompts))]


def served(st, target, options):
    """The texts of a scheduler: one is cancelled, one goes on, and two share a prefix."""
    text = {name: options[name] for name in ("max_new_tokens", "temperature", "key")}
    drafts = {name: options[name] for name in ("drafter", "topology")}
    scheduler = st.Scheduler(
        target, rows=2, max_length=64, quantum=2, prefix_cache_bytes=10**7, **drafts
    )
    stem = scheduler.read(PROMPTS[0])
    requests = [st.Request(prompt, keep=True, **text) for prompt in PROMPTS]
    ids = [scheduler.submit(request) for request in requests]
    ids.append(scheduler.submit(st.Request([], after=stem, **text)))
    ids.append(scheduler.submit(st.Request([4, 5], max_new_tokens=40)))
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


HYBRID = "bamba"
LONG = [1, 2, 3] * 30


def served_hybrid(st, data, model):
    """Texts of a hybrid, whose caches grow while rows decode."""
    import jax

    from stree_jax.testing import perturbed, random_model
    from tests.sharding.configs import CONFIGS

    mesh, target = st.make_mesh(data=data, model=model), random_model(CONFIGS[HYBRID])
    draft = st.shard(perturbed(target, 0.1), mesh, replicate=True)
    sizes = dict(rows=2, max_length=150, quantum=2, first_places=64, prefix_cache_bytes=10**7)
    scheduler = st.Scheduler(st.shard(target, mesh), drafter=st.ModelDrafter(draft), **sizes)
    text = dict(max_new_tokens=NEW_TOKENS, temperature=0.8)
    prompts = [*PROMPTS, LONG]
    requests = [st.Request(p, key=jax.random.key(i), **text) for i, p in enumerate(prompts)]
    ids = [scheduler.submit(request) for request in requests]
    done = {completion.request_id: completion for completion in scheduler.completions()}
    return [done[i].tokens for i in ids]


def served_apart(st, target, process):
    scheduler = st.Scheduler(target, rows=2, max_length=64)
    scheduler.submit(st.Request([1 + process], max_new_tokens=2))
    return [*scheduler.completions()]


def main():
    process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    import jax

    jax.distributed.initialize(f"localhost:{port}", 2, process)
    import stree_jax as st

    found = {}
    # Along "data" each process has a row of the mesh; along "model" half of all layers.
    for data, model in ((2, 2), (1, 4)):
        mesh = st.make_mesh(data=data, model=model)
        target = st.from_pretrained(folder / "target", mesh=mesh)
        draft = st.from_pretrained(folder / "draft", mesh=mesh, replicate=True)
        options = dict(max_new_tokens=NEW_TOKENS, drafter=st.ModelDrafter(draft))
        options["topology"] = st.TreeTopology.from_branching((2, 1))
        out = st.generate(target, PROMPTS, **options)
        assert out.stats.tau > 1
        found[f"{data}x{model}"] = out.tokens.tolist()
        st.save_pretrained(target, folder / f"saved {data}x{model}", model_card=f"of {process}")
        if data == 2:
            options |= dict(temperature=0.8, key=jax.random.key(1))
            found["sampled"] = st.generate(target, PROMPTS, **options).tokens.tolist()
            found["served"] = served(st, target, options)
            steps = [*st.stream(target, PROMPTS, max_new_tokens=3)]
            found["streamed"] = joined(steps, PROMPTS)
            # Rows of its own for each process: the first one has two, the second one.
            own = slice(0, 2) if process == 0 else slice(2, 3)
            found["own"] = st.generate(target, PROMPTS[own], **options, local_rows=True)
            options["key"] = jax.random.split(jax.random.key(2), 3)
            found["keys"] = st.generate(target, PROMPTS, **options).tokens.tolist()
            options["key"] = options["key"][own]
            found["own keys"] = st.generate(target, PROMPTS[own], **options, local_rows=True)
            steps = [*st.stream(target, PROMPTS[own], **options, local_rows=True)]
            found["streamed own"] = joined(steps, PROMPTS[own])
            no_rows = PROMPTS if process == 0 else []
            options = dict(max_new_tokens=NEW_TOKENS, local_rows=True)
            found["none"] = st.generate(target, no_rows, **options)
            found["streamed none"] = joined([*st.stream(target, no_rows, **options)], no_rows)
            for name in ("own", "own keys", "none"):
                found[name] = found[name].tokens.tolist()
        found[f"hybrid {data}x{model}"] = served_hybrid(st, data, model)
    # Cut into four parts, of which each process has two.
    whole = st.shard(target, None)
    found["back"] = st.generate(whole, PROMPTS, max_new_tokens=NEW_TOKENS).tokens.tolist()
    st.save_pretrained(whole, folder / "saved whole")
    errors = {
        "prompts": lambda: st.generate(target, [[1 + process]], max_new_tokens=2),
        "save": lambda: st.save_pretrained(target, folder / "saved 1x4"),
        "own prompts": lambda: st.generate(target, [[1], []][: 2 - process], local_rows=True),
        "own prompts, streamed": lambda: st.stream(
            target, [[1], []][: 2 - process], local_rows=True
        ),
        "some kinds of keys": lambda: st.generate(
            target,
            [[1]],
            temperature=1.0,
            key=jax.random.split(jax.random.key(0), 1) if process else jax.random.key(0),
            local_rows=True,
        ),
        "other requests": lambda: served_apart(st, target, process),
        "no prompts": lambda: st.generate(target, [], local_rows=True),
        "some devices": lambda: st.make_mesh(data=2),
    }
    for name, call in errors.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    print(json.dumps(found), flush=True)  # noqa: T201
    os._exit(0)  # without the service's goodbye, which waits for the other process


if __name__ == "__main__":
    main()
