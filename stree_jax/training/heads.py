"""`train_heads`: from a recipe to heads on a target's hidden states."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax.array_types import Array, Float, Tokens
from stree_jax.heads import open_head, save_head
from stree_jax.models.lm import HybridLM
from stree_jax.training.recipe import Recipe
from stree_jax.training.run import card, open_target, run_directory, run_text, weights_digest
from stree_jax.training.trainer import Progress, evaluate, fit


class HeadPlan(NamedTuple):
    """The heads that a recipe asks for.

    Attributes:
        kind: their kind, as `stree_jax.heads.ROOMS` has it.
        new: new heads, given some of the text.
        loss: the loss of heads, given the target and tokens `[B, T]`.
    """

    kind: str
    new: Callable[[Tokens], Any]
    loss: Callable[[Any, HybridLM, Tokens], Float[Array, ""]]


def train_heads(
    recipe: Recipe, target_path: Path, output: Path, planned: Callable[[HybridLM], HeadPlan]
) -> Iterator[Progress]:
    """Trains heads for a target, whose weights stay as they are.

    `planned` says what heads a target gets; other arguments, yields and errors are those of
    `distill`.
    """
    recipe.refuse_models()
    tokenizer, target = open_target(target_path, output)
    plan = planned(target)
    fingerprint = recipe.fingerprint() | {"target": weights_digest(target), "kind": plan.kind}
    run = run_directory(output, fingerprint, functools.partial(open_head, plan.kind))
    text = run_text(recipe, tokenizer, target)
    heads = plan.new(jnp.asarray(text.held_out[0]))

    def loss(heads: Any, tokens: jax.Array, target: HybridLM) -> jax.Array:
        return plan.loss(heads, target, tokens[:, :-1])

    yield from fit(heads, loss, text.batch, recipe.training, run / "steps", target)
    graph, weights = nnx.split(heads)

    def stored_as(dtype: Any) -> Any:
        small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(dtype), weights)
        return nnx.merge(graph, small)

    final = evaluate(stored_as(jnp.float32), loss, text.held_out, target)
    save_head(stored_as(jnp.bfloat16), target, output, model_card=card(final), overwrite=True)
