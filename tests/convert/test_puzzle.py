"""Nemotron-H whose layers differ: `nemotron_h_puzzle`."""

import copy

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.convert.reading import open_checkpoint
from tests.convert import checkpoints, numpy_nemotron_h
from tests.helpers import by_message, refusal

MOE = dict(block_type="moe", n_routed_experts=4, num_experts_per_tok=1) | dict(
    moe_intermediate_size=12, moe_shared_expert_intermediate_size=10
)
CONFIG = dict(
    model_type="nemotron_h_puzzle",
    architectures=["NemotronHPuzzleForCausalLM"],
    vocab_size=37,
    hidden_size=16,
    mamba_num_heads=4,
    mamba_head_dim=8,
    ssm_state_size=8,
    n_groups=2,
    conv_kernel=4,
    chunk_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    layer_norm_epsilon=1e-5,
    routed_scaling_factor=2.5,
    tie_word_embeddings=False,
    num_hidden_layers=8,
    hybrid_override_pattern="ME*M-E*E",
    blockwise_members=["block_type", "moe_intermediate_size"],
    mtp_block_configs=[{"block_type": "attention"}, {"block_type": "moe"}],
    num_nextn_predict_layers=1,
    block_configs=[
        dict(block_type="mamba"),
        MOE,
        dict(block_type="attention", sliding_window=3),
        dict(block_type="mamba", ssm_state_size=4),
        dict(block_type="mlp", intermediate_size=20),
        MOE | dict(n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=8),
        dict(block_type="attention", sliding_window=None),
        MOE | dict(moe_latent_size=6, routed_scaling_factor=0.5, norm_topk_prob=False),
    ],
)
TOKENS = np.random.default_rng(0).integers(0, 37, 19)


def random_weights(config, prefix="model"):
    """Hostile ones: corrections that decide the choice of experts, steps from tiny to large."""
    rng = np.random.default_rng(0)
    weights = checkpoints.described_weights(numpy_nemotron_h, config, prefix)
    for name, value in weights.items():
        if name.endswith("correction_bias"):
            value[:] = rng.normal(size=value.shape)
        if name.endswith("dt_bias"):
            value[:] = rng.uniform(-6, 3, size=value.shape)
    return weights


def written(path, changes=(), prefix="model", more=()):
    config = copy.deepcopy(CONFIG) | dict(changes)
    weights = random_weights(config, prefix)
    checkpoints.write_safetensors(path, config, weights | dict(more))
    return config, weights


@pytest.mark.parametrize("prefix", ["model", "backbone"])
def test_logits_are_those_of_the_definition(tmp_path, prefix):
    head = {"mtp.layers.0.enorm.weight": np.ones(16, np.float32)}
    config, weights = written(tmp_path / "puzzle", prefix=prefix, more=head)
    model = st.from_pretrained(tmp_path / "puzzle")
    want = numpy_nemotron_h.logits(config, weights, TOKENS, prefix)
    got = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, TOKENS[None]))[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    sizes = [layer for layer in model.config.layers if layer.kind == "moe"]
    assert [(e.num_experts, e.num_active, e.hidden_size) for e in sizes] == [
        (4, 1, 12),
        (6, 3, 8),
        (4, 1, 12),
    ]
    assert [layer.window for layer in model.config.layers if layer.kind == "attention"] == [3, None]
    notes = open_checkpoint(tmp_path / "puzzle").ignored
    assert any(note.startswith("mtp.layers.0.enorm.weight: ") for note in notes)


BLOCKS = CONFIG["block_configs"]
REFUSED = [
    (dict(block_configs=None), "block_configs is null"),
    (dict(block_configs=[["mamba"]]), "block_configs must be a list with a table for each layer"),
    (
        dict(block_configs=[BLOCKS[0] | {"q_indexer_top_k": 8}]),
        r"unknown fields .*block_configs\[0\]\.q_indexer_top_k",
    ),
    (
        dict(block_configs=[{"block_type": "attention", "sliding_window": 0}]),
        r"block_configs\[0\]\.sliding_window must be an integer, from 1",
    ),
]


@by_message(("changes", "message"), REFUSED)
def test_what_is_refused(tmp_path, changes, message):
    weights = random_weights(CONFIG)
    checkpoints.write_safetensors(tmp_path / "puzzle", CONFIG | changes, weights)
    checkpoints.refused(tmp_path / "puzzle", message)


def test_other_formats_have_no_place_for_it(tmp_path):
    written(tmp_path / "puzzle")
    refusal(
        "layers differ in their .* configs",
        st.convert.convert,
        tmp_path / "puzzle",
        tmp_path / "out",
        to="nemotron_h",
    )
