"""From a recipe to a multi-token-prediction head."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax import AttentionConfig, HybridLM, MlpConfig, ModelConfig, MoeConfig
from stree_jax.array_types import Array, Float, Tokens
from stree_jax.checks import check_int, require
from stree_jax.extensions.mtp.drafter import MtpModel
from stree_jax.extensions.mtp.head import MtpConfig, MtpHead
from stree_jax.training import HeadPlan, Recipe, ahead_loss

_MOST_STEPS = 16
_SMALL = 0.02  # standard deviation of what the embedding adds at first
_LAYERS: dict[str, Any] = {"attention": AttentionConfig, "mlp": MlpConfig, "moe": MoeConfig}


def plan(recipe: Recipe, target: HybridLM) -> HeadPlan:
    """Returns what is trained by a recipe, see `docs/recipe.md`."""
    config, steps = head_of(recipe, target)
    rngs = nnx.Rngs(jax.random.key(recipe.seed, impl="threefry2x32"))

    def loss(head: MtpHead, target: HybridLM, tokens: Tokens) -> Float[Array, ""]:
        """Of drafts that are made as in decoding."""
        model = MtpModel(target, head)

        def logits(hidden: Array) -> Iterator[Array]:
            for ahead, output in enumerate(model.outputs_ahead(tokens, hidden, steps), 1):
                yield model.logits(output[:, :-ahead])

        return ahead_loss(target, tokens, logits)

    return HeadPlan(new=lambda text: new_head(config, target, text, rngs=rngs), loss=loss)


def new_head(config: MtpConfig, target: HybridLM, tokens: Tokens, *, rngs: nnx.Rngs) -> MtpHead:
    """Makes a head that gives the target's state back, as Medusa's heads do at first."""
    # The kernels have no derivatives.
    head = MtpHead(config, dtype=target.dtype, rngs=rngs, implementation="xla")
    kernel = head.in_proj.kernel
    noise = _SMALL * jax.random.normal(rngs.params(), kernel[...].shape, kernel.dtype)
    width = config.d_model
    kernel[...] = noise.at[width:].set(jnp.eye(width, dtype=kernel.dtype))
    for end in (head.attention.out_proj.kernel, *_last_products(head.feed_forward)):
        end[...] = jnp.zeros_like(end[...])
    size = jnp.sqrt(jnp.square(jax.jit(HybridLM.hidden)(target, tokens)).mean())
    head.final_norm_scale[...] *= size.astype(head.final_norm_scale.dtype)
    return head


def head_of(recipe: Recipe, target: HybridLM) -> tuple[MtpConfig, int]:
    """Returns a recipe's head, and its drafts a step."""
    table, config = recipe.model, target.config
    try:
        require({*table} <= {*_LAYERS, "steps"}, f"got {sorted(table)}")
        steps = check_int("steps", table.get("steps", 4), 1, _MOST_STEPS)
        attention = _layer(table, config, ["attention"])
        feed_forward = _layer(table, config, ["mlp", "moe"])
        norms = config.norm_eps, config.norm_float32
        return MtpConfig(config.d_model, attention, feed_forward, *norms), steps
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{recipe.source}, [model] has steps, [model.attention], and [model.mlp] or"
            f" [model.moe]: {error}"
        ) from error


def _layer(table: Mapping[str, Any], config: ModelConfig, kinds: Sequence[str]) -> Any:
    """Returns a recipe's layer of these kinds, or the target's last one."""
    named = [kind for kind in kinds if kind in table]
    if len(named) == 1:
        return _LAYERS[named[0]](**table[named[0]])
    target_layers = [layer for layer in config.layers if layer.kind in kinds]
    if named or not target_layers:
        what = " or ".join(f"[model.{kind}]" for kind in kinds)
        raise ValueError(f"got {sorted(table)}, and the target needs one table {what}")
    return target_layers[-1]


def _last_products(feed_forward: Any) -> list[Any]:
    """The weights after which nothing of a layer is multiplied."""
    if hasattr(feed_forward, "out_proj"):
        return [feed_forward.out_proj.kernel]
    latent, shared = feed_forward.latent_out, feed_forward.shared
    last = [feed_forward.experts_out if latent is None else latent.kernel]
    return last + ([] if shared is None else [shared.out_proj.kernel])
