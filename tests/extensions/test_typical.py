"""Typical acceptance is lossy, follows its definition, and is never used unasked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.sampling import position_noise
from stree_jax.decoding.types import Sampling, Step
from stree_jax.decoding.verifiers import LOSSY_VERIFIERS
from stree_jax.testing import tiny_model
from tests.decoding import enumeration as en
from tests.methods import SAMPLED, drafts

TREE = st.TreeTopology.from_parents([-1, 0, 0, 1, 2, 2])


def verdicts(p, tokens, valid):
    """The rule's verdicts for distributions `[B, N, V]`, and those of its definition."""
    batch = len(p)
    draft = en.draft_of(TREE, tokens, valid=valid)
    sampling = Sampling(jnp.ones(batch))
    keys = jax.random.split(jax.random.key(0), batch)
    logits = jnp.log(jnp.asarray(p, jnp.float32))
    noise = position_noise(keys, jnp.zeros(batch, jnp.int32), TREE.depth, logits.shape[-1])
    step = Step(None, keys, noise, sampling)
    got = LOSSY_VERIFIERS["typical"].verify(draft, logits, step, TREE)
    want = []
    for row in range(batch):
        best, depth = 0, {0: 0}
        for node, parent in enumerate(TREE.parents[1:], 1):
            law = p[row, parent]
            bound = min(0.09, 0.3 * np.exp((law * np.log(law)).sum()))
            if parent in depth and valid[row, node] and law[tokens[row, node]] > bound:
                depth[node] = depth[parent] + 1
                best = node if depth[node] > depth[best] else best
        want.append(best)
    return got, np.array(want)


def test_the_rule_is_its_definition():
    rng, batch = np.random.default_rng(0), 200
    p = rng.dirichlet(np.full(en.VOCAB, 0.3), size=(batch, TREE.num_nodes)) + 1e-6
    p /= p.sum(-1, keepdims=True)
    tokens = rng.integers(en.VOCAB, size=(batch, TREE.num_nodes))
    valid = rng.random((batch, TREE.num_nodes)) < 0.9
    valid[:, 0] = True
    valid = ~(TREE.ancestor_mask & ~valid[:, None]).any(-1)
    got, want = verdicts(p, tokens, valid)
    np.testing.assert_array_equal(got.last, want)
    np.testing.assert_array_equal(got.num_accepted, np.array(TREE.depths)[want])
    assert len({*want.tolist()}) == TREE.num_nodes


@pytest.mark.thorough
def test_it_is_never_used_unasked():
    """Its refusals are in tests/decoding/test_refusals.py."""
    common = dict(max_new_tokens=9, lossy=True, **drafts(tiny_model(), "chain of 1"), **SAMPLED)
    out = st.generate(tiny_model(), [[1]], verifier="typical", **common)
    assert not out.lossless
    assert out.lengths.tolist() == [9]
    exact = st.generate(tiny_model(), [[1]], **common)
    assert exact.lossless
    assert {*LOSSY_VERIFIERS}.isdisjoint(st.VERIFIERS)
