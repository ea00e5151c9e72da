"""Do Medusa heads draft better than a draft model or prompt lookup on this machine?

The target's hidden state predicts the next tokens; nothing else is run. Ranks of the target's own
tokens among the candidates of each head give the tau of every tree, and the tree with the largest
for its size. Then all methods decode the same prompts in turn, at temperature 0 and 1. Typical
acceptance, which is LOSSY, is decoded apart, with its distance from the target on four tokens,
enumerated.

    python -m benchmarks.medusa [--heads DIR] [--prompts 8] [--tokens 96] [--rounds 3] [--nodes 13]
        [--temperatures 0 1] [--output DIR | --commit]

The heads are those of the embedded target, or others that `stree-jax medusa` trained for it. Exit
code 1 if decoding gives other tokens than without drafts.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import stree_jax as st
from benchmarks.common import (
    conclude,
    machine,
    print_table,
    progress_bar,
    read_options,
    save,
)
from benchmarks.decode import Method, decoding_calls, measure_decoding, print_methods
from benchmarks.models import embedded_pair, num_bytes
from stree_jax.decoding.options import plan
from stree_jax.decoding.types import DraftTree, Sampling
from stree_jax.decoding.verifiers import LOSSY_VERIFIERS
from stree_jax.tuning.search import acceptance, replay_tau

NUM_RANKS = 8
VOCAB = 4  # of the enumeration


def best_tree(accept: np.ndarray, num_nodes: int) -> st.TreeTopology:
    """The tree of so many nodes with the most probable paths, were ranks independent by depth."""
    chances = {(): 1.0}
    for depth in range(len(accept)):
        for path in [path for path in chances if len(path) == depth]:
            for rank, odds in enumerate(accept[depth]):
                chances[(*path, rank)] = chances[path] * float(odds)
    # A path is never more probable than the one above it, nor than its earlier sisters if the
    # odds fall with the rank; ties go to the shorter and earlier one.
    chosen = sorted(chances, key=lambda path: (-chances[path], len(path), path))[:num_nodes]
    kept = {()}
    for path in sorted(chosen, key=lambda path: (len(path), path)):
        if not path or (
            path[:-1] in kept and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in kept)
        ):
            kept.add(path)
    order = sorted(kept, key=lambda path: (len(path), path))
    place = {path: index for index, path in enumerate(order)}
    return st.TreeTopology((-1, *(place[path[:-1]] for path in order[1:])))


def trace(
    target: st.HybridLM,
    drafter: st.MedusaDrafter,
    prompts: list[list[int]],
    tokens: int,
    temperature: float,
) -> Any:
    """Ranks by depth on texts that the target writes for these prompts."""
    options: dict[str, Any] = {
        "max_new_tokens": tokens,
        "temperature": temperature,
        "key": jax.random.key(1),
    }
    request = plan(target, prompts, **options)
    texts = st.generate(target, prompts, **options)
    written = [row[:length] for row, length in zip(texts.tokens, texts.lengths, strict=True)]
    return drafter.rank_trace(target, request, written, NUM_RANKS)


def typical_distance(seeds: int) -> dict[str, float]:
    """Total variation of the first two tokens from the target under typical acceptance.

    Random models on `VOCAB` tokens; the drafts are the two best tokens of a draft model that
    resembles the target, and the best one after each.
    """
    topology = st.TreeTopology.from_branching((2, 1))
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        laws = rng.dirichlet(np.full(VOCAB, 0.7), size=(2, VOCAB + 1))  # after nothing, after each
        target, other = laws
        draft = 0.5 * target + 0.5 * other
        first = np.argsort(-draft[VOCAB])[:2]
        tokens = [0, *first, *(np.argmax(draft[token]) for token in first)]
        p = np.stack([target[VOCAB], *(target[token] for token in first), *[target[VOCAB]] * 2])
        drafts = DraftTree(
            jnp.asarray([tokens], jnp.int32),
            topology.tree(jnp.ones((1, topology.num_nodes), bool)),
            None,
            jnp.full(topology.num_nodes, -1, jnp.int32),
            jnp.ones(1, bool),
        )
        last = int(
            LOSSY_VERIFIERS["typical"]
            .verify(
                jax.random.split(jax.random.key(0), 1),
                drafts,
                jnp.log(jnp.asarray(p[None], jnp.float32)),
                Sampling(jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1)),
                None,
                topology=topology,
            )
            .last[0]
        )
        path = [tokens[node] for node in np.flatnonzero(topology.ancestor_mask[last]) if node]
        joint = np.zeros((VOCAB, VOCAB))
        if len(path) == 2:
            joint[tuple(path)] = 1.0
        elif len(path) == 1:
            joint[path[0]] = target[path[0]]
        else:
            joint = target[VOCAB][:, None] * target[:VOCAB]
        want = target[VOCAB][:, None] * target[:VOCAB]
        found.append(0.5 * float(np.abs(joint - want).sum()))
    return {"mean": float(np.mean(found)), "largest": float(np.max(found))}


def main(arguments: Sequence[str] | None = None) -> None:
    """Traces, decodes, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=Path, help="what `stree-jax medusa` wrote")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=13, help="of the tree chosen by ranks")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    options = read_options(parser, arguments)
    where = machine()
    pair = embedded_pair(2 * options.prompts)
    heads = st.load_medusa(options.heads or st.demo_path("medusa"), pair.target)
    drafter = st.MedusaDrafter(pair.target, heads)
    traced, prompts = pair.prompts[: options.prompts], pair.prompts[options.prompts :]
    chain = st.TreeTopology.chain(heads.num_heads)

    rows, tables, lossy = [], [], []
    with progress_bar() as progress:
        task = progress.add_task(
            "",
            total=len(options.temperatures) * decoding_calls([None] * 7, prompts, options.rounds),
        )
        for temperature in options.temperatures:
            progress.update(task, description="ranks")
            ranks = trace(pair.target, drafter, traced, options.tokens, temperature)
            accept = acceptance(ranks, heads.num_heads)
            chosen = best_tree(accept, options.nodes)
            tables.append({"temperature": temperature, "accept": accept.tolist()})
            tables[-1] |= {"tree": chosen.parents, "expected_tau": replay_tau(chosen, ranks)}
            draft = st.ModelDrafter(pair.draft)
            ways = [
                Method("autoregressive", None, None),
                Method(f"Medusa, chain of {chain.depth}", drafter, chain),
                Method("Medusa, default tree", drafter, drafter.default_topology()),
                Method(f"Medusa, tree of {chosen.num_nodes} by ranks", drafter, chosen),
                Method("draft model, chain of 4", draft, st.TreeTopology.chain(4)),
                Method("draft model, tree A", draft, st.TreeTopology.paper("A")),
                Method("prompt lookup, chain of 4", st.NgramDrafter(), st.TreeTopology.chain(4)),
            ]
            rows += measure_decoding(
                pair.target,
                ways,
                prompts,
                tokens=options.tokens,
                temperature=temperature,
                rounds=options.rounds,
                progress=progress,
                task=task,
            )
            if temperature > 0:
                out = st.generate(
                    pair.target,
                    prompts,
                    max_new_tokens=options.tokens,
                    drafter=drafter,
                    topology=chosen,
                    verifier="typical",
                    lossy=True,
                    temperature=temperature,
                    key=jax.random.key(0),
                )
                assert not out.lossless
                lossy.append({"temperature": temperature, "tau": out.stats.tau})
    distance = typical_distance(12)

    for table in tables:
        print_table(
            f"How often the candidate of each rank is right, if all above it are; temperature"
            f" {table['temperature']:g}",
            ("head", *map(str, range(NUM_RANKS))),
            [
                (str(head), *(f"{odds:.3f}" for odds in row))
                for head, row in enumerate(table["accept"], 1)
            ],
        )
    for temperature in options.temperatures:
        print_methods(
            f"{options.prompts} prompts ({pair.source}), {options.tokens} tokens, temperature"
            f" {temperature:g}",
            [row for row in rows if row["temperature"] == temperature],
            {"nodes": "nodes"},
        )
    print_table(
        "Tokens by depth: share of steps that accept at least so many drafts",
        ("method", "temperature", *map(str, range(1, 5))),
        [
            (
                row["method"],
                f"{row['temperature']:g}",
                *itertools.islice([f"{s:.3f}" for s in row["accepted_per_depth"]] + ["-"] * 4, 4),
            )
            for row in rows
            if row["nodes"] > 1
        ],
    )
    for row in lossy:
        print(
            f"LOSSY: typical acceptance, temperature {row['temperature']:g}: tau {row['tau']:.2f};"
            f" on {VOCAB} tokens its first two are {distance['mean']:.2f} (mean) and"
            f" {distance['largest']:.2f} (largest) in total variation from the target"
        )
    sizes = {
        name: {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(part))),
            "bytes": num_bytes(part),
        }
        for name, part in (("target", pair.target), ("draft", pair.draft), ("heads", heads))
    }
    print_table(
        "Sizes, as loaded",
        ("", "parameters", "MiB"),
        [(name, f"{s['parameters']:,}", s["bytes"] / 2**20) for name, s in sizes.items()],
    )
    results = pair.settings() | {
        "machine": where,
        "ranks": tables,
        "decoding": rows,
        "lossy_typical": lossy,
        "lossy_typical_distance": distance,
        "sizes": sizes,
    }
    path = save("medusa", __doc__, results, options.output)
    different = [row["method"] for row in rows if row["identical"] is False]
    conclude("medusa", passed=not different, different=different, results=str(path))


if __name__ == "__main__":
    main()
