"""`train_mtp`: from a recipe to a multi-token-prediction head with a model card."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax import AttentionConfig, HybridLM, MlpConfig, MoeConfig
from stree_jax.array_types import Array, Float, Tokens
from stree_jax.checks import check_int
from stree_jax.decoding import outputs_ahead
from stree_jax.extensions.mtp.model import MtpModel
from stree_jax.heads import head_config, save_head
from stree_jax.models import MtpConfig, MtpHead
from stree_jax.training import HeadPlan, Progress, Recipe, ahead_loss, train_heads

_MOST_STEPS = 16
_SMALL = 0.02  # standard deviation of what the embedding adds at first
_LAYERS: dict[str, Any] = {"attention": AttentionConfig, "mlp": MlpConfig, "moe": MoeConfig}


def train_mtp(
    recipe: Recipe, target_path: Path, output: Path, *, command: str
) -> Iterator[Progress]:
    """Trains a multi-token-prediction head for a target, whose weights stay as they are.

    Arguments, yields and errors are those of `distill`. The recipe's model table has `steps`, the
    drafts that a step of training makes one after the other, and the tables `attention` (fields of
    `AttentionConfig`) and `mlp` or `moe` (of `MlpConfig` or `MoeConfig`).
    """

    def planned(target: HybridLM) -> HeadPlan:
        config, steps = head_of(recipe, target)

        def loss(head: MtpHead, target: HybridLM, tokens: Tokens) -> Float[Array, ""]:
            return mtp_loss(head, target, tokens, steps)

        return HeadPlan(
            kind="mtp",
            check=head_config,
            new=lambda text: new_head(config, target, text, rngs=nnx.Rngs(recipe.seed)),
            loss=loss,
            save=save_head,
            title="A multi-token-prediction head",
            shares="the embedding and the output head",
            averages=f"{steps} steps",
        )

    yield from train_heads(recipe, target_path, output, planned, command=command)


def new_head(config: MtpConfig, target: HybridLM, tokens: Tokens, *, rngs: nnx.Rngs) -> MtpHead:
    """A head that begins as "what the target predicts at the state before": Medusa's start.

    The projection of the state is the identity, both branches add nothing, and the final norm has
    the mean size of the target's states, which have the weight of its own final norm already.

    Args:
        config: sizes of the head.
        target: the model that it is for.
        tokens: texts on which the size of the states is measured.
        rngs: random streams for initialisation.
    """
    # The kernels have no derivatives.
    head = MtpHead(config, dtype=target.dtype, rngs=rngs, implementation="xla")
    kernel = head.in_proj.kernel
    noise = _SMALL * jax.random.normal(rngs.params(), kernel[...].shape, kernel.dtype)
    width = config.d_model
    kernel[...] = noise.at[width:].set(jnp.eye(width, dtype=kernel.dtype))
    ends = [head.attention.out_proj.kernel, *_last_products(head.feed_forward)]
    for end in ends:
        end[...] = jnp.zeros_like(end[...])
    size = jnp.sqrt(jnp.square(jax.jit(HybridLM.hidden)(target, tokens)).mean())
    head.final_norm_scale[...] *= size.astype(target.dtype)
    return head


def mtp_loss(head: MtpHead, target: HybridLM, tokens: Tokens, steps: int) -> Float[Array, ""]:
    """Mean KL divergence of a head's drafts from the target, see `ahead_loss`.

    As in decoding, a draft comes from the true entries up to the root and from the head's own
    outputs below it, on the tokens of the text.
    """
    model = MtpModel(target, head)

    def logits(hidden: Array) -> Iterator[Array]:
        for step, output in enumerate(outputs_ahead(model, tokens, hidden, steps)):
            yield model.logits(output[:, : -(step + 1)])

    return ahead_loss(target, tokens, logits)


def head_of(recipe: Recipe, target: HybridLM) -> tuple[MtpConfig, int]:
    """The head of a recipe's model table, and the number of steps that it is trained for.

    Raises:
        ValueError: a field is missing, unknown or invalid.
    """
    table, config = recipe.model, target.config
    kinds = [kind for kind in ("mlp", "moe") if kind in table]
    try:
        if not {*table} <= {*_LAYERS, "steps"} or "attention" not in table or len(kinds) != 1:
            raise ValueError(f"got {sorted(table)}")
        steps = check_int("steps", table.get("steps", 4), 1, _MOST_STEPS)
        attention, feed_forward = (_LAYERS[kind](**table[kind]) for kind in ("attention", kinds[0]))
        return MtpConfig(config.d_model, attention, feed_forward, config.norm_eps), steps
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{recipe.source}, [model] has steps, [model.attention], and [model.mlp] or"
            f" [model.moe]: {error}"
        ) from error


def _last_products(feed_forward: Any) -> list[Any]:
    """The weights after which nothing of a layer is multiplied."""
    if hasattr(feed_forward, "out_proj"):
        return [feed_forward.out_proj.kernel]
    latent, shared = feed_forward.latent_out, feed_forward.shared
    last = [feed_forward.experts_out if latent is None else latent.kernel]
    return last + ([] if shared is None else [shared.out_proj.kernel])
