"""`train_medusa`: from a recipe to Medusa heads with a model card."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from stree_jax import HybridLM
from stree_jax.array_types import Array, Float, Tokens
from stree_jax.extensions.medusa.checkpoint import KIND, check_medusa, save_medusa
from stree_jax.extensions.medusa.heads import MedusaHeads
from stree_jax.training import (
    Progress,
    Recipe,
    card_tables,
    evaluate,
    fit,
    open_target,
    run_directory,
    run_text,
    weights_digest,
)

_NEXT_HEAD = 0.8  # weight of a head, relative to the one before (Medusa, arXiv:2401.10774)


def train_medusa(
    recipe: Recipe, target_path: Path, output: Path, *, command: str
) -> Iterator[Progress]:
    """Trains Medusa heads for a target, whose weights stay as they are.

    Arguments, yields and errors are those of `distill`. The recipe's model table has only
    `num_heads`.
    """
    tokenizer, target = open_target(target_path, output)
    fingerprint = recipe.fingerprint() | {"target": weights_digest(target), "kind": KIND}
    run = run_directory(output, fingerprint, check_medusa)
    try:
        heads = MedusaHeads(target, rngs=nnx.Rngs(recipe.seed), **recipe.model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{recipe.source}, [model] has num_heads alone: {error}") from error
    text = run_text(recipe, tokenizer, target)

    def loss(heads: MedusaHeads, tokens: jax.Array, target: HybridLM) -> jax.Array:
        return medusa_loss(heads, target, tokens[:, :-1])

    yield from fit(heads, loss, text.batch, recipe.training, run / "steps", target)
    graph, weights = nnx.split(heads)

    def stored_as(dtype: Any) -> MedusaHeads:
        small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(dtype), weights)
        return nnx.merge(graph, small)

    final = evaluate(stored_as(jnp.float32), loss, text.held_out, target)
    card = f"""# {heads.num_heads} Medusa heads

{sum(leaf.size for leaf in jax.tree.leaves(weights)):,} parameters, stored as bfloat16, for the
target `{target_path.name}` and no other. They share its output head.

- Command: `{command}`
- Held-out KL divergence from the target, over all heads, earlier ones counting more: {final:.4f}
  nats a token, on the last 1 % of each file, with the stored weights

{card_tables(recipe, text.corpus)}"""
    save_medusa(stored_as(jnp.bfloat16), target, output, model_card=card, overwrite=True)


def medusa_loss(heads: MedusaHeads, target: HybridLM, tokens: Tokens) -> Float[Array, ""]:
    """Mean KL divergence of the heads from the target, in nats per token.

    The loss of a head weighs 0.8 times that of the head before it. Head d at a token predicts what
    the target predicts d tokens later. The labels are the target's probabilities: on text that the
    target wrote, their optimum is that of the cross-entropy, and they have less noise.
    """
    vocab_size = target.config.vocab_size
    hidden = jax.lax.stop_gradient(target.hidden(tokens))
    labels = jax.lax.stop_gradient(jax.nn.log_softmax(target.logits(hidden)[..., :vocab_size]))
    total, weights = jnp.float32(0.0), 0.0
    ahead = heads(hidden)
    for head in range(heads.num_heads):
        after = head + 1
        logits = target.logits(ahead[:, :-after, head])[..., :vocab_size]
        divergence = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(logits), labels[:, after:]
        )
        weight = _NEXT_HEAD**head
        total, weights = total + weight * divergence.mean(), weights + weight
    return total / weights
