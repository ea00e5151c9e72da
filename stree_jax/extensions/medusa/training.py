"""From a recipe to Medusa heads."""

from collections.abc import Iterator

from flax import nnx

from stree_jax import HybridLM
from stree_jax.array_types import Array, Float, Tokens
from stree_jax.extensions.medusa.head import MedusaHeads
from stree_jax.training import HeadPlan, Recipe, ahead_loss


def plan(recipe: Recipe, target: HybridLM) -> HeadPlan:
    """Returns what is trained by a recipe whose model table has `num_heads` alone."""
    try:
        heads = MedusaHeads(target, rngs=nnx.Rngs(recipe.seed), **recipe.model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{recipe.source}, [model] has num_heads alone: {error}") from error
    return HeadPlan(new=lambda _: heads, loss=medusa_loss)


def medusa_loss(heads: MedusaHeads, target: HybridLM, tokens: Tokens) -> Float[Array, ""]:
    """Mean KL divergence of the heads from the target, see `ahead_loss`."""
    vocab_size = target.config.vocab_size

    def logits(hidden: Array) -> Iterator[Array]:
        ahead = heads(hidden)
        for head in range(heads.num_heads):
            yield target.logits(ahead[:, : -(head + 1), head])[..., :vocab_size]

    return ahead_loss(target, tokens, logits)
