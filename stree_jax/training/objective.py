"""Losses: next-token cross-entropy, and the KL divergence of a draft from its target."""

import jax
import jax.numpy as jnp
import optax

from stree_jax.array_types import Array, Float, Tokens
from stree_jax.models.lm import HybridLM


def next_token_loss(model: HybridLM, tokens: Tokens) -> Float[Array, ""]:
    """Mean cross-entropy of each token given its prefix, in nats per token."""
    logits = model(tokens[:, :-1])[..., : model.config.vocab_size]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def distillation_loss(
    model: HybridLM, target_logits: Float[Array, "B T V"], tokens: Tokens
) -> Float[Array, ""]:
    """Mean `KL(target || model)` over the positions of `tokens`, in nats per token.

    A draft token is accepted with probability one minus the total variation distance of the two
    distributions (Leviathan et al. 2022, arXiv:2211.17192), and by Pinsker's inequality this
    distance is at most `sqrt(KL / 2)`.
    """
    logits = model(tokens)[..., : model.config.vocab_size]
    target = jax.nn.log_softmax(target_logits[..., : model.config.vocab_size])
    return jnp.mean(optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), target))
