"""Multi-token-prediction heads: recipes and training; their drafts are in test_heads.py."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding import head_model
from stree_jax.extensions.mtp.training import head_of
from stree_jax.testing import tiny_model
from stree_jax.training import Recipe, Training
from tests.extensions import qwen_files
from tests.extensions.heads import parts

HEADS = {"attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, r"\[model\] has steps, \[model.attention\], .*: got \[\]"),
        (HEADS | {"mlp": {"hidden_size": 8}, "moe": {}}, "got"),
        (HEADS | {"mlp": {"hidden_size": 8}, "steps": 0}, "steps must be an integer, from 1 to 16"),
        (HEADS | {"mlp": {"width": 8}}, "hidden_size|width"),
        (HEADS | {"mlp": 8}, "mapping"),
    ],
)
def test_recipes_that_are_refused(table, message):
    recipe = Recipe(table, Training(1), ())
    with pytest.raises(ValueError, match=message):
        head_of(recipe, tiny_model())


@pytest.mark.thorough
def test_without_tables_a_head_is_as_the_targets_layers():
    config, target = qwen_files.model_config(), parts("mtp, qwen").target
    own, steps = head_of(Recipe({}, Training(1), ()), target)
    assert own == st.MtpConfig(16, config.attention, config.mlp, 1e-6, norm_float32=True)
    assert own == parts("mtp, qwen").head.config
    assert steps == 4
    smaller = {"mlp": {"hidden_size": 8}}
    own, _ = head_of(Recipe(smaller, Training(1), ()), target)
    assert (own.attention, own.feed_forward) == (config.attention, st.MlpConfig(8))


@pytest.mark.thorough
def test_no_gradient_flows_through_recycled_outputs():
    """Of a head that is one number: its drafts are powers of it, and have the same values."""

    class Power(head_model.HeadModel):
        def __init__(self, number):
            self.head = types.SimpleNamespace(
                init_cache=lambda *sizes: None,
                tree=lambda embedded, above, *others: (number * above, None),
            )

        def embedded(self, tokens):
            return None

    def drafts(number, detached):
        tokens, hidden = jnp.zeros((1, 5), jnp.int32), jnp.ones((1, 5, 1))
        outputs = Power(number).outputs_ahead(tokens, hidden, 3, detached=detached)
        return jnp.stack([output[0, 0, 0] for output in outputs])

    for detached, slopes in ((False, [1, 6, 27]), (True, [1, 3, 9])):
        np.testing.assert_array_equal(drafts(3.0, detached), [3, 9, 27])
        np.testing.assert_array_equal(jax.jacobian(drafts)(3.0, detached), slopes)
