"""Losses: next-token cross-entropy, and the KL divergence of drafts from their target."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax

from stree_jax.array_types import Array, Float, Int, Tokens
from stree_jax.models.lm import HybridLM

_NEXT_DRAFT = 0.8  # weight of a draft, relative to the one before


def next_token_loss(model: HybridLM, tokens: Tokens, _: None = None) -> Float[Array, ""]:
    """Mean cross-entropy of each token given its prefix, in nats per token."""
    logits = model(tokens[:, :-1])[..., : model.config.vocab_size]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def distillation_loss(
    model: HybridLM, target_logits: Float[Array, "B T V"], tokens: Tokens
) -> Float[Array, ""]:
    """Returns the mean `KL(target || model)` of all positions, in nats."""
    logits = model(tokens)[..., : model.config.vocab_size]
    target = jax.nn.log_softmax(target_logits[..., : model.config.vocab_size])
    return divergence(logits, target).mean()


def divergence(logits: Float[Array, "*rows V"], labels: Float[Array, "*rows V"]) -> Array:
    """KL divergence of drafts from the target's log-probabilities."""
    return optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), labels)


def ahead_loss(
    target: HybridLM,
    tokens: Tokens,
    drafts: Callable[[Array], Iterable[Array]],
    inner: tuple[int, ...] = (),
    places: Int[Array, " A"] | None = None,
    loss: Callable[[Array, Array], Array] = divergence,
) -> Float[Array, ""]:
    """Returns the mean KL divergence of drafts from the target, in nats.

    The loss of a draft weighs 0.8 times that of the draft before it (Medusa, arXiv:2401.10774). The
    labels are the target's probabilities: on text that the target wrote, their optimum is that of
    the cross-entropy, and they have less noise. The target gets no gradient.

    `drafts` makes logits of the first draft, the second and so on from the target's states, with
    those of its `inner` layers. Those of draft d, at all tokens but the last d or at `places`,
    predict what the target predicts d tokens later. Another `loss` takes whatever `drafts` makes,
    and the target's log-probabilities.
    """
    vocab_size = target.config.vocab_size
    hidden = jax.lax.stop_gradient(target.hidden(tokens, inner))
    last = target.logits(hidden[..., : target.config.d_model])[..., :vocab_size]
    labels = jax.lax.stop_gradient(jax.nn.log_softmax(last))
    total, weights = jnp.float32(0.0), 0.0
    for ahead, logits in enumerate(drafts(hidden), 1):
        wanted = labels[:, ahead:] if places is None else labels[:, places + ahead]
        weight = _NEXT_DRAFT ** (ahead - 1)
        total += weight * loss(logits, wanted).mean()
        weights += weight
    return total / weights
