"""`train_mtp`: from a recipe to a multi-token-prediction head."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax import AttentionConfig, HybridLM, MlpConfig, ModelConfig, MoeConfig
from stree_jax.array_types import Array, Float, Tokens
from stree_jax.checks import check_int
from stree_jax.decoding import outputs_ahead
from stree_jax.extensions.mtp.drafter import MtpModel
from stree_jax.extensions.mtp.head import MtpConfig, MtpHead
from stree_jax.training import HeadPlan, Progress, Recipe, ahead_loss, train_heads

_MOST_STEPS = 16
_SMALL = 0.02  # standard deviation of what the embedding adds at first
_LAYERS: dict[str, Any] = {"attention": AttentionConfig, "mlp": MlpConfig, "moe": MoeConfig}


def train_mtp(recipe: Recipe, target_path: Path, output: Path) -> Iterator[Progress]:
    """Trains a multi-token-prediction head for a target, which stays as it is.

    Arguments, yields and errors are those of `distill`. The recipe's model table has `steps`, the
    drafts that a step of training makes one after the other, the tables `attention` (fields of
    `AttentionConfig`) and `mlp` or `moe` (of `MlpConfig` or `MoeConfig`), and `boost_after`: after
    as many steps all rows are the target's own text, and `mtp_loss` is `detached`. Without a table
    that layer is as the target's last one of its kind.
    """

    def planned(target: HybridLM) -> HeadPlan:
        config, steps, boost_after = head_of(recipe, target)
        loss = functools.partial(mtp_loss, steps=steps)
        return HeadPlan(
            kind="mtp",
            new=lambda text: new_head(
                config,
                target,
                text,
                rngs=nnx.Rngs(jax.random.key(recipe.seed, impl="threefry2x32")),
            ),
            loss=loss,
            boost=(boost_after, functools.partial(loss, detached=True)),
        )

    yield from train_heads(recipe, target_path, output, planned)


def new_head(config: MtpConfig, target: HybridLM, tokens: Tokens, *, rngs: nnx.Rngs) -> MtpHead:
    """Makes a head that begins as Medusa's heads do.

    The projection of the state is the identity, both branches add nothing, and the final norm has
    the mean size of the target's states, which include the weight of its final norm.
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
    head.final_norm_scale[...] *= size.astype(head.final_norm_scale.dtype)
    return head


def mtp_loss(
    head: MtpHead, target: HybridLM, tokens: Tokens, steps: int, *, detached: bool = False
) -> Float[Array, ""]:
    """Mean KL divergence of a head's drafts from the target, see `ahead_loss`.

    As in decoding, a draft comes from the true entries up to the root and from the head's own
    outputs below it, on the tokens of the text. `detached` says that no gradient flows through the
    outputs that it recycles, as in the "boosting" of Nemotron 3 Ultra's report.
    """
    model = MtpModel(target, head)

    def logits(hidden: Array) -> Iterator[Array]:
        outputs = outputs_ahead(model, tokens, hidden, steps, detached=detached)
        for ahead, output in enumerate(outputs, 1):
            yield model.logits(output[:, :-ahead])

    return ahead_loss(target, tokens, logits)


def head_of(recipe: Recipe, target: HybridLM) -> tuple[MtpConfig, int, int]:
    """Returns a recipe's head, its drafts a step, and `boost_after`."""
    table, config = recipe.model, target.config
    try:
        if not {*table} <= {*_LAYERS, "steps", "boost_after"}:
            raise ValueError(f"got {sorted(table)}")
        steps = check_int("steps", table.get("steps", 4), 1, _MOST_STEPS)
        last = recipe.training.steps
        boost_after = check_int("boost_after", table.get("boost_after", last), 0, last)
        attention, feed_forward = (
            _layer(table, config, kinds) for kinds in (("attention",), ("mlp", "moe"))
        )
        own = config.norm_eps, config.norm_float32
        return MtpConfig(config.d_model, attention, feed_forward, *own), steps, boost_after
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{recipe.source}, [model] has steps, boost_after, [model.attention], and"
            f" [model.mlp] or [model.moe]: {error}"
        ) from error


def _layer(table: Mapping[str, Any], config: ModelConfig, kinds: Sequence[str]) -> Any:
    """Returns a recipe's layer of these kinds, or the target's last one."""
    named = [kind for kind in kinds if kind in table]
    if len(named) == 1:
        return _LAYERS[named[0]](**table[named[0]])
    like = [layer for layer in config.layers if layer.kind in kinds]
    if named or not like:
        what = " or ".join(f"[model.{kind}]" for kind in kinds)
        raise ValueError(f"got {sorted(table)}, and the target needs one table {what}")
    return like[-1]


def _last_products(feed_forward: Any) -> list[Any]:
    """The weights after which nothing of a layer is multiplied."""
    if hasattr(feed_forward, "out_proj"):
        return [feed_forward.out_proj.kernel]
    latent, shared = feed_forward.latent_out, feed_forward.shared
    last = [feed_forward.experts_out if latent is None else latent.kernel]
    return last + ([] if shared is None else [shared.out_proj.kernel])
