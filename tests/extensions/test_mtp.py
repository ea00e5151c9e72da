"""Multi-token-prediction heads: recipes and training; their drafts are in test_heads.py."""

import pytest

import stree_jax as st
from stree_jax.extensions.mtp.training import head_of
from stree_jax.testing import tiny_model
from stree_jax.training import Recipe, Training
from tests.extensions import qwen_files
from tests.extensions.heads import parts

HEADS = {"attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
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
