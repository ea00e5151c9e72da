"""What is minimised: next-token loss, and the divergence of a draft from its target."""

import jax
import jax.numpy as jnp
import optax

from stree_jax.array_types import Array, Float, Tokens
from stree_jax.models.lm import HybridLM


def next_token_loss(model: HybridLM, tokens: Tokens) -> Float[Array, ""]:
    """Mean cross-entropy of each token given those before it, in nats."""
    logits = model(tokens[:, :-1])[..., : model.config.vocab_size]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def distillation_loss(
    model: HybridLM, target_logits: Float[Array, "B T V"], tokens: Tokens
) -> Float[Array, ""]:
    """Mean `KL(target || model)` over the positions of `tokens`, in nats.

    The acceptance of a draft token is one minus the total variation between the two, which this
    bounds.
    """
    logits = model(tokens)[..., : model.config.vocab_size]
    target = jax.nn.log_softmax(target_logits[..., : model.config.vocab_size])
    return jnp.mean(optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), target))
