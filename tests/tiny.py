"""Tiny models that several tests share, with weights that make every parameter matter."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax import HybridLM, ModelConfig

# One config for each group of knobs. With tied embeddings a random model likes to repeat itself, so
# the one that most decoding tests use is untied.
CONFIGS = {
    "plain": ModelConfig.tiny(tie_embeddings=False),
    "groups": ModelConfig.tiny(
        head_dim=8,
        d_model=16,
        num_groups=2,
        conv_width=3,
        norm="norm_then_gate",
        d_per_channel=True,
        in_proj_bias=True,
        out_proj_bias=True,
        conv_bias=False,
        tie_embeddings=False,
        padded_vocab_size=40,
    ),
    "mamba_in_llama": ModelConfig.tiny(
        expand=1, head_dim=4, state_size=4, num_groups=4, num_x_heads=2, num_b_groups=2
    ),
    "repeated_first": ModelConfig.tiny(
        expand=1,
        head_dim=4,
        state_size=4,
        num_groups=4,
        num_x_heads=2,
        num_b_groups=2,
        repeat_before_conv=True,
        norm_groups=2,
    ),
    "branch": ModelConfig.tiny(
        mlp_dim=6,
        norm="none",
        dt_limit=(0.01, 0.5),
        input_multiplier=0.7,
        section_multipliers=(1.1, 0.9, 1.2, 0.8, 1.3),
    ),
}


@functools.cache
def tiny_model(name="plain", seed=0, dtype="float32", implementation=None):
    """A model of this config with random weights, norms not 1, D not 1 and lively time steps."""
    model = HybridLM(CONFIGS[name], dtype=dtype, rngs=nnx.Rngs(seed), implementation=implementation)
    return randomised(model, seed)


def randomised(model, seed):
    """The model with all its weights drawn anew, so that its logits are far from uniform."""
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten_with_path(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = []
    for key, (path, leaf) in zip(keys, leaves, strict=True):
        name = jax.tree_util.keystr(path)
        noise = jax.random.normal(key, leaf.shape)
        if "A_log" in name:
            value = jax.random.uniform(key, leaf.shape, minval=-1.0, maxval=2.0)
        elif "dt_bias" in name:
            value = jax.random.uniform(key, leaf.shape, minval=-4.0, maxval=1.0)
        elif "scale" in name or "'D'" in name:
            value = 1 + 0.3 * noise
        elif "bias" in name:
            value = 0.2 * noise
        elif "conv_weight" in name:
            value = 0.5 * noise
        else:  # matrices
            value = noise * (1.0 if "embedding" in name else leaf.shape[0] ** -0.5)
        new.append(value.astype(leaf.dtype))
    return nnx.merge(graphdef, jax.tree.unflatten(structure, new))


def perturbed(model, amount, seed=0):
    """A model that agrees with `model` often, but not always: its weights with relative noise."""
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [
        leaf * (1 + amount * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, new))


def apply(model, tokens):
    """Logits of whole sequences, compiled once per model structure and shape."""
    return _apply(model, jnp.asarray(tokens))


@jax.jit
def _apply(model, tokens):
    return model(tokens)
