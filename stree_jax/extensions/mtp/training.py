"""`train_mtp`: from a recipe to a multi-token-prediction head with a model card."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from stree_jax import AttentionConfig, HybridLM, MlpConfig, MoeConfig
from stree_jax.array_types import Array, Float, Tokens
from stree_jax.checks import check_int
from stree_jax.decoding import outputs_ahead
from stree_jax.extensions.mtp.model import MtpModel
from stree_jax.heads import head_config, save_head
from stree_jax.models import MtpConfig, MtpHead
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

_NEXT_STEP = 0.8  # weight of a step, relative to the one before
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
    tokenizer, target = open_target(target_path, output)
    fingerprint = recipe.fingerprint() | {"target": weights_digest(target), "kind": "mtp"}
    config, steps = head_of(recipe, target)
    run = run_directory(output, fingerprint, head_config)
    text = run_text(recipe, tokenizer, target)
    head = new_head(config, target, jnp.asarray(text.held_out[0]), rngs=nnx.Rngs(recipe.seed))

    def loss(head: MtpHead, tokens: jax.Array, target: HybridLM) -> jax.Array:
        return mtp_loss(head, target, tokens[:, :-1], steps)

    yield from fit(head, loss, text.batch, recipe.training, run / "steps", target)
    graph, weights = nnx.split(head)

    def stored_as(dtype: Any) -> MtpHead:
        small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(dtype), weights)
        return nnx.merge(graph, small)

    final = evaluate(stored_as(jnp.float32), loss, text.held_out, target)
    card = f"""# A multi-token-prediction head

{sum(leaf.size for leaf in jax.tree.leaves(weights)):,} parameters, stored as bfloat16, for the
target `{target_path.name}` and no other. It shares the target's embedding and output head.

- Command: `{command}`
- Held-out KL divergence from the target, over {steps} steps, earlier ones counting more:
  {final:.4f} nats a token, on the last 1 % of each file, with the stored weights

{card_tables(recipe, text.corpus)}"""
    save_head(stored_as(jnp.bfloat16), target, output, model_card=card, overwrite=True)


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
    """Mean KL divergence of a head's drafts from the target, in nats per token.

    As in decoding, a draft comes from the true entries up to the root and from the head's own
    outputs below it, on the tokens of the text. The loss of a step weighs 0.8 times that of the
    step before it. The labels are the target's probabilities, see `medusa_loss`.
    """
    vocab_size = target.config.vocab_size
    hidden = jax.lax.stop_gradient(target.hidden(tokens))
    labels = jax.lax.stop_gradient(jax.nn.log_softmax(target.logits(hidden)[..., :vocab_size]))
    model = MtpModel(target, head)
    total, weights = jnp.float32(0.0), 0.0
    for step, output in enumerate(outputs_ahead(model, tokens, hidden, steps)):
        after = step + 1
        divergence = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(model.logits(output[:, :-after])), labels[:, after:]
        )
        weight = _NEXT_STEP**step
        total, weights = total + weight * divergence.mean(), weights + weight
    return total / weights


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
