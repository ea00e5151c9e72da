"""`train_heads`: from a recipe to heads on a target's hidden states."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax.array_types import Array, Float, Tokens
from stree_jax.heads import HEADS, VARIANTS, open_head, part_of, save_head
from stree_jax.messages import shown
from stree_jax.models.identity import identity
from stree_jax.models.lm import HybridLM
from stree_jax.training.recipe import Recipe
from stree_jax.training.run import card, open_target, run_directory, run_text
from stree_jax.training.trainer import Progress, evaluate, fit


class HeadPlan(NamedTuple):
    """The heads that a recipe asks for.

    Attributes:
        new: new heads, given some of the text.
        loss: the loss of heads, given the target and tokens `[B, T]`.
    """

    new: Callable[[Tokens], Any]
    loss: Callable[[Any, HybridLM, Tokens], Float[Array, ""]]


def train_heads(kind: str, recipe: Recipe, target_path: Path, output: Path) -> Iterator[Progress]:
    """Trains heads for a target, whose weights stay as they are.

    The recipe's model table is that of `kind`, "medusa", "mtp", "dflash" or "dflash2", in
    `docs/recipe.md`: the room's `training.plan` makes a `HeadPlan` of a recipe and a target. Other
    arguments, yields and errors are those of `distill`.
    """
    known = [*(name for name, room in HEADS.items() if room.training), *VARIANTS]
    if kind not in known:
        raise ValueError(f"heads that can be trained are {', '.join(known)}, got {shown(kind)}")
    if kind in VARIANTS:
        kind, table = VARIANTS[kind]
        recipe = dataclasses.replace(recipe, model={**table, **recipe.model})
    if recipe.start is not None:
        raise ValueError(f"{recipe.source}: start is for `train` and `distill`; leave it out")
    tokenizer, target = open_target(target_path, output)
    plan = part_of(kind, "training").plan(recipe, target)
    fingerprint = recipe.fingerprint() | {"target": identity(target), "kind": kind}
    run = run_directory(output, fingerprint, functools.partial(open_head, kind))
    batch, held_out = run_text(recipe, tokenizer, target)
    heads = plan.new(jnp.asarray(held_out[0]))

    def loss(heads: Any, tokens: jax.Array, target: HybridLM) -> jax.Array:
        return plan.loss(heads, target, tokens[:, :-1])

    yield from fit(heads, loss, batch, recipe.training, run / "steps", target)
    graph, weights = nnx.split(heads)

    def stored_as(dtype: Any) -> Any:
        small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(dtype), weights)
        return nnx.merge(graph, small)

    final = evaluate(stored_as(jnp.float32), loss, held_out, target)
    save_head(stored_as(jnp.bfloat16), target, output, model_card=card(final), overwrite=True)
