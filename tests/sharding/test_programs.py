"""Without a mesh a program has nothing of one."""

import re

import pytest

import stree_jax as st
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import plan
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.testing import random_model
from tests.sharding.configs import CONFIGS

pytestmark = pytest.mark.thorough

OF_MESHES = re.compile(
    r"all_reduce|all_gather|collective_permute|all_to_all|shard_map|manual_computation"
    r"|sdy\.mesh @(?!empty)"
)


def lowered(model):
    drafter = st.ModelDrafter(model) if model.partition == ONE_DEVICE else None
    tree = st.TreeTopology.chain(1) if drafter else None
    request = plan(model, [[1, 2]], max_new_tokens=4, drafter=drafter, topology=tree)
    decoder = request.decoder
    state = decoder.start(model, drafter, request.context, request.keys)
    arguments = (decoder, model, drafter, state, request.limits, request.sampling)
    return SpeculativeDecoder.run.lower(*arguments).as_text()


def test_a_program_without_a_mesh_has_no_collective():
    model = random_model(CONFIGS["one layer"])
    assert not OF_MESHES.findall(lowered(model))
    # And the words that are looked for are those of a mesh, even of one device.
    assert OF_MESHES.findall(lowered(st.shard(model, st.make_mesh())))
