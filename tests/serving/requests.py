"""Requests with different settings, and what each gives alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax as st
from stree_jax.testing import perturbed

TREE = st.TreeTopology.from_branching((2, 1))


def ragged(count, seed=0, vocab_size=37, **common):
    """Requests with different prompts, limits, keys and end tokens."""
    rng = np.random.default_rng(seed)
    return [
        st.Request(
            rng.integers(0, vocab_size, size=int(rng.integers(1, 30))).tolist(),
            max_new_tokens=int(rng.integers(1, 26)),
            eos_token=[(), 5, [7, 11]][i % 3],
            key=jax.random.key(100 + i),
            **common,
        )
        for i in range(count)
    ]


WAYS = (
    dict(temperature=0.0),
    dict(temperature=0.7, top_k=5),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=1.0),
)


def mixed(requests, ways=WAYS):
    """Every way of sampling in turn, greedy ones too."""
    return [dataclasses.replace(r, **ways[i % len(ways)]) for i, r in enumerate(requests)]


def in_families(requests):
    """Two of three get a prompt that begins as those of their family do."""
    rng = np.random.default_rng(3)
    stems = [rng.integers(0, 37, size=size).tolist() for size in (50, 23)]
    return [
        dataclasses.replace(r, prompt=stems[i % 3 - 1] + r.prompt[: 1 + i // 6 * 5]) if i % 3 else r
        for i, r in enumerate(requests)
    ]


def alone(model, requests, **options):
    """Tokens of each request: all in one batch without drafts, whose rows do not see each other."""
    most = max(r.max_new_tokens for r in requests)
    texts = []
    for _, group in itertools.groupby(
        sorted(range(len(requests)), key=lambda i: (requests[i].temperature, requests[i].top_k)),
        key=lambda i: (requests[i].temperature, requests[i].top_k),
    ):
        rows = [requests[i] for i in group]
        out = st.generate(
            model,
            [r.prompt for r in rows],
            max_new_tokens=most,
            temperature=rows[0].temperature,
            top_k=rows[0].top_k,
            top_p=rows[0].top_p,
            eos_token=(),
            key=jnp.stack([r.key for r in rows]),
            **options,
        )
        texts += [(id(r), cut(row.tolist(), r)) for r, row in zip(rows, out.tokens, strict=True)]
    by_request = dict(texts)
    return [by_request[id(r)] for r in requests]


def cut(tokens, request):
    """Up to the request's own end."""
    tokens = tokens[: request.max_new_tokens]
    ends = np.isin(tokens, request.eos_token).nonzero()[0]
    return tokens[: ends[0] + 1] if len(ends) else tokens


def served(scheduler, requests):
    """Completions in the order of the requests."""
    ids = [scheduler.submit(request) for request in requests]
    done = {completion.request_id: completion for completion in scheduler.completions()}
    assert sorted(ids) == sorted(done)
    return [done[i] for i in ids]


def drafting(model):
    return dict(drafter=st.ModelDrafter(perturbed(model, 0.1)), topology=TREE)
