"""Rules that keep the distribution and not the text: samples of whole decode loops.

Their arithmetic is enumerated without sampling in test_verify.py. Methods that follow the target
give the text of autoregressive decoding (test_lossless.py), so its distribution is theirs.
"""

import functools

import pytest

import stree_jax as st
from stree_jax.testing import assert_same_distribution, random_model
from tests.decoding.rules import random_walk
from tests.helpers import heads_of
from tests.methods import TREE

pytestmark = pytest.mark.thorough

SIX = st.ModelConfig.tiny(vocab_size=6, num_layers=1)
THREE = st.ModelConfig.tiny(vocab_size=3, num_layers=1)
iid = functools.partial(st.ModelDrafter, child_sampling="iid")
unlike = functools.partial(st.ModelDrafter, child_sampling="without_replacement")
turns = functools.partial(st.InterleavedDrafter, pattern="sqs", child_sampling="iid")
FILTERED = dict(temperature=0.8, top_k=5)
RULES = [random_walk(3, size=6), st.RepetitionPenalty(1.5), st.LogitBias({2: 0.5})]
# The first step of heads has no drafts, and three models need a few steps.
LONGER = dict(temperature=6.0, num_tokens=3)


def of_draft(draft, _):
    return iid(draft)


# A drafter from draft models, and options.
EXACT = {
    "autoregressive, top-k": (lambda *_: None, FILTERED),
    "without replacement": (lambda draft, _: unlike(draft), FILTERED | dict(topology=TREE)),
    "multi-step": (of_draft, FILTERED | dict(topology=TREE)),
    "traversal, processors": (
        of_draft,
        dict(verifier="traversal", topology=TREE, rows=2048, processors=RULES, min_p=0.05),
    ),
    "turns": (turns, LONGER),
}
SLOW = {
    "deep traversal": (
        of_draft,
        FILTERED | dict(verifier="traversal", topology=st.TreeTopology.chain(9)),
    ),
    **{
        f"heads, {kind}": (
            lambda target, _, kind=kind: st.MedusaDrafter(
                target, heads_of(target, 2), child_sampling=kind
            ),
            LONGER | dict(num_tokens=4, topology=TREE),
        )
        for kind in ("iid", "without_replacement")
    },
}


@pytest.mark.parametrize(
    "name", [*EXACT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_samples_have_the_targets_distribution(name):
    make, options = (EXACT | SLOW)[name]
    config = THREE if name.startswith(("heads", "turns")) else SIX
    target, medium, small = (random_model(config, seed) for seed in range(3))
    drafter = make(target if name.startswith("heads") else medium, small)
    out = assert_same_distribution(target, drafter, **options)
    assert drafter is None or out.stats.num_accepted > 0
