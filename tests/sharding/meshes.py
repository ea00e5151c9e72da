"""Models on meshes and on one device, whose texts must be the same."""

import functools

import numpy as np

import stree_jax as st
from stree_jax.testing import PROMPTS, RandomChoice, perturbed, random_model
from tests.sharding.configs import CONFIGS

NEW_TOKENS = 12
TREE = st.TreeTopology.from_branching((3, 2, 1))


@functools.cache
def mesh_of(data, model):
    return st.make_mesh(data=data, model=model)


@functools.cache
def model_of(name):
    return random_model(CONFIGS[name])


@functools.cache
def draft_of(name):
    return perturbed(model_of(name), 0.1)


@functools.cache
def sharded(name, data, model):
    return st.shard(model_of(name), mesh_of(data, model))


@functools.cache
def replicated_draft(name, data, model):
    return st.shard(draft_of(name), mesh_of(data, model), replicate=True)


# Kinds of drafts: how a drafter is made of a draft model, and its tree, if not its own.
DRAFTERS = {
    "tree": (st.ModelDrafter, TREE),
    "chain": (st.ModelDrafter, st.TreeTopology.chain(3)),
    "random trees": (st.ModelDrafter, RandomChoice()),
    "ngram": (lambda _: st.NgramDrafter(), None),
    "beam": (st.BeamDrafter, st.TreeTopology.beam(3, 3)),
    "dynamic": (st.DynamicDrafter, st.TreeTopology.budget(8, 3)),
    "deep": (st.ModelDrafter, st.TreeTopology.chain(10)),
    "turns": (lambda draft: st.InterleavedDrafter(draft, draft, "sqq"), None),
    "without replacement": (
        functools.partial(st.ModelDrafter, child_sampling="without_replacement"),
        TREE,
    ),
}


def drafts(kind, draft):
    """Options of a kind of drafts; "" is none."""
    if not kind:
        return {}
    make, topology = DRAFTERS[kind]
    return dict(drafter=make(draft), topology=topology)


def drafts_on(name, mesh, kind="tree"):
    return drafts(kind, replicated_draft(name, *mesh))


def decode(model, prompts=PROMPTS, **options):
    return st.generate(model, prompts, **dict(max_new_tokens=NEW_TOKENS) | options)


def assert_same(got, want):
    """Two generations, or two completions, are the same text."""
    for name in ("tokens", "lengths", "finish_reasons", "finish_reason"):
        mine, wanted = (getattr(each, name, None) for each in (got, want))
        np.testing.assert_array_equal(mine, wanted, name)
    for name in ("log_probs", "top_log_probs"):
        mine, wanted = (getattr(each, name) for each in (got, want))
        assert (mine is None) == (wanted is None)
        if mine is not None:
            np.testing.assert_allclose(mine, wanted, atol=1e-4, err_msg=name)
