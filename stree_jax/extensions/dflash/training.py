"""From a recipe to a DFlash head."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from stree_jax import AttentionConfig, HybridLM, MlpConfig
from stree_jax.array_types import Array, Float, Tokens
from stree_jax.extensions.dflash.drafter import DFlashModel
from stree_jax.extensions.dflash.head import DFlashConfig, DFlashHead
from stree_jax.training import HeadPlan, Recipe, ahead_loss, divergence

_BLOCKS = 16  # of a text, in a step of training
_FIELDS = (
    "layers",
    "inner_layers",
    "block_size",
    "mask_token",
    "shifted",
    "conv_width",
    "conv_group",
    "markov_rank",
    "candidates",
    "confidence_head",
    "attention",
    "mlp",
)


def plan(recipe: Recipe, target: HybridLM) -> HeadPlan:
    """Returns what is trained by a recipe, see `docs/recipe.md`."""
    config = head_of(recipe, target)
    rngs = nnx.Rngs(jax.random.key(recipe.seed, impl="threefry2x32"))
    # The kernels have no derivatives.
    head = DFlashHead(config, dtype=target.dtype, rngs=rngs, implementation="xla")
    return HeadPlan(new=lambda _: head, loss=dflash_loss)


def dflash_loss(head: DFlashHead, target: HybridLM, tokens: Tokens) -> Float[Array, ""]:
    """Mean KL divergence from the target of the drafts of some blocks, see `ahead_loss`.

    Plus, as DSpark's loss has it (its equation 8), the cross-entropy of the confidence head against
    the mass that the two distributions share. Of that label no gradient flows.

    With candidates, the divergence of their logits, and beside it the divergence among the first
    candidates with the scores of pairs, as in speculators (vllm-project/speculators #1006). Labels
    of both are the target's probabilities, there its most probable token.
    """
    model = DFlashModel(target, head)
    spacing = max(1, (tokens.shape[1] - model.max_depth - 1) // _BLOCKS)
    places = jnp.arange(_BLOCKS, dtype=jnp.int32) * spacing
    places = (places + tokens.sum() % spacing) % (tokens.shape[1] - model.max_depth)

    def outputs(hidden: Array) -> Array:
        return jnp.moveaxis(model.outputs_at(tokens, hidden, places), 2, 0)

    def loss(outputs: Array, labels: Array) -> Array:
        if head.config.candidates:
            return _selector_loss(model, outputs, labels)
        logits = model.logits(outputs)
        loss = divergence(logits, labels)
        if head.config.confidence_head == "none":
            return loss
        shared = jnp.minimum(jax.nn.softmax(logits), jnp.exp(labels)).sum(axis=-1)
        shared = jax.lax.stop_gradient(shared)
        confidence = head.confidence(outputs)
        return loss + optax.losses.sigmoid_binary_cross_entropy(confidence, shared)

    return ahead_loss(target, tokens, outputs, model.inner_layers, places, loss)


def _selector_loss(model: DFlashModel, outputs: Array, labels: Array) -> Array:
    """The loss of places whose candidates have scores of pairs."""
    unary, candidates = model.table(outputs)
    assert candidates is not None
    _, scores = model.scores(outputs, unary, candidates)
    among = jax.nn.log_softmax(jnp.take_along_axis(labels, candidates, axis=-1))
    return divergence(unary, labels) + divergence(scores, among)


def head_of(recipe: Recipe, target: HybridLM) -> DFlashConfig:
    """Returns a recipe's head."""
    table, config = {"layers": 1, "block_size": 8, **recipe.model}, target.config
    try:
        if not {"inner_layers", "attention", "mlp"} <= {*table} <= {*_FIELDS}:
            raise ValueError(f"got {sorted(table)}")
        fields = {"mask_token": config.vocab_size - 1, "vocab_size": config.vocab_size} | table
        fields["windows"] = (None,) * fields.pop("layers")
        fields["inner_layers"] = tuple(fields["inner_layers"])
        fields["attention"] = AttentionConfig(**fields["attention"])
        fields["mlp"] = MlpConfig(**fields["mlp"])
        head = DFlashConfig(config.d_model, **fields)
        length = recipe.training.sequence_length
        if length <= head.num_drafts:
            raise ValueError(f"a block has {head.num_drafts} drafts, and a row {length} tokens")
        return head
    except (TypeError, ValueError) as error:
        raise ValueError(f"{recipe.source}, [model] has {', '.join(_FIELDS)}: {error}") from error
