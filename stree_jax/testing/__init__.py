"""For tests of your own drafters and verifiers: tiny models, and exactness as one call.

    import stree_jax as st
    from stree_jax.testing import assert_lossless, assert_same_distribution, perturbed, tiny_model

    model = tiny_model("falcon_h1 hybrid")
    drafter = st.ModelDrafter(perturbed(model, 0.1))
    assert_lossless(model, drafter, topology=st.TreeTopology.from_branching((2, 2)))

The weights of tiny models are random, in float32, and make every parameter matter: norms are not 1,
D is not 1, time steps vary, and logits are far from uniform.
"""

from stree_jax.testing.exactness import (
    PROMPTS,
    RandomChoice,
    apply,
    assert_lossless,
    assert_same_distribution,
    assert_same_text,
    bits_obstacle,
)
from stree_jax.testing.models import (
    CONFIGS,
    HYBRIDS,
    perturbed,
    random_model,
    random_mtp_head,
    randomised,
    tiny_model,
)

__all__ = [
    "CONFIGS",
    "HYBRIDS",
    "PROMPTS",
    "RandomChoice",
    "apply",
    "assert_lossless",
    "assert_same_distribution",
    "assert_same_text",
    "bits_obstacle",
    "perturbed",
    "random_model",
    "random_mtp_head",
    "randomised",
    "tiny_model",
]
