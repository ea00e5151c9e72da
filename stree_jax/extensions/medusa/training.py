"""`train_medusa`: from a recipe to Medusa heads."""

from collections.abc import Iterator
from pathlib import Path

from flax import nnx

from stree_jax import HybridLM
from stree_jax.array_types import Array, Float, Tokens
from stree_jax.extensions.medusa.head import MedusaHeads
from stree_jax.training import HeadPlan, Progress, Recipe, ahead_loss, train_heads


def train_medusa(recipe: Recipe, target_path: Path, output: Path) -> Iterator[Progress]:
    """Trains Medusa heads for a target, whose weights stay as they are.

    Arguments, yields and errors are those of `distill`. The recipe's model table has only
    `num_heads`.
    """

    def planned(target: HybridLM) -> HeadPlan:
        try:
            heads = MedusaHeads(target, rngs=nnx.Rngs(recipe.seed), **recipe.model)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{recipe.source}, [model] has num_heads alone: {error}") from error
        return HeadPlan(kind="medusa", new=lambda _: heads, loss=medusa_loss)

    yield from train_heads(recipe, target_path, output, planned)


def medusa_loss(heads: MedusaHeads, target: HybridLM, tokens: Tokens) -> Float[Array, ""]:
    """Mean KL divergence of the heads from the target, see `ahead_loss`.

    Head d at a token predicts what the target predicts d tokens later.
    """
    vocab_size = target.config.vocab_size

    def logits(hidden: Array) -> Iterator[Array]:
        ahead = heads(hidden)
        for head in range(heads.num_heads):
            yield target.logits(ahead[:, : -(head + 1), head])[..., :vocab_size]

    return ahead_loss(target, tokens, logits)
