"""EAGLE-3 heads in files: a config and `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`."""

from collections.abc import Collection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import HybridLM
from stree_jax.convert import (
    AS_IS,
    TRANSPOSED,
    Checkpoint,
    Fields,
    Rule,
    hf_attention,
    llama_parts,
    read_head,
    read_tensor,
    split_mlp,
    within,
)
from stree_jax.extensions.eagle3.head import Eagle3Config, Eagle3Head


def load(path: Path, target: HybridLM, ignore: Collection[str]) -> Eagle3Head:
    """Reads a head for its target, in the target's dtype."""
    tables = ("d2t", "t2d")
    return read_head("eagle3", path, target, ignore, read_config, rules_of, tables, _tokens)


def read_config(fields: Fields, target: HybridLM, has_embedding: bool) -> Eagle3Config:
    """Returns the config of a head from its config.json."""
    aux = "eagle_aux_hidden_state_layer_ids"
    num_layers = len(target.config.layers)
    fields.null("eagle_config", "draft_vocab_size", aux)
    eagle = fields.table("eagle_config")
    eagle.null(aux)
    for name in (aux, "norm_before_fc", "norm_before_residual"):
        fields.alias(eagle, **{name: name})
    layers = fields.take(aux, [2, num_layers // 2, num_layers - 3])
    fields.check(
        isinstance(layers, list)
        and len(layers) > 0
        and all(type(layer) is int and 1 <= layer <= num_layers for layer in layers)
        and layers == sorted({*layers}),
        "eagle_aux_hidden_state_layer_ids must be ascending numbers of the target's"
        f" {num_layers} layers, got {layers!r:.80}",
    )
    fields.check(not fields.flag("norm_before_fc", False), "norm_before_fc = true is not supported")
    before = fields.flag("norm_before_residual", False)
    eagle.flag("use_aux_hidden_state", True)
    width = fields.integer("hidden_size")
    fields.same("target_hidden_size", width)
    fields.same("num_hidden_layers", 1)
    attention, mlp, norm_eps = llama_parts(fields, width, 1e-5, input_multiple=2)
    vocab_size = fields.integer("vocab_size")
    config = Eagle3Config(
        d_model=width,
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size", vocab_size),
        inner_layers=tuple(layers),
        attention=attention,
        mlp=mlp,
        norm_eps=norm_eps,
        norm_before_residual=before,
        has_embedding=has_embedding,
    )
    fields.ignore("of training", "eagle_module", "speculators_config")
    eagle.finish()
    return config


def rules_of(config: Eagle3Config) -> list[Rule]:
    """The tensors of a head, by the names of `Eagle3Head`."""
    return [
        Rule("fc.weight", "fc.kernel", TRANSPOSED),
        Rule("embed_tokens.weight", "embedding", AS_IS),
        Rule("midlayer.input_layernorm.weight", "embedding_norm_scale"),
        Rule("midlayer.hidden_norm.weight", "hidden_norm_scale"),
        *within(hf_attention(config.attention), "midlayer.self_attn", "attention"),
        Rule("midlayer.post_attention_layernorm.weight", "feed_forward_norm_scale"),
        *within(split_mlp(config.mlp), "midlayer.mlp", "feed_forward"),
        Rule("norm.weight", "final_norm_scale"),
        Rule("lm_head.weight", "output_head"),
    ]


def _tokens(checkpoint: Checkpoint, config: Eagle3Config) -> dict[str, jax.Array]:
    """Returns the target's token for each token of the head."""
    path, tensors = checkpoint.path, checkpoint.tensors
    target_tokens = np.arange(config.draft_vocab_size)
    if "d2t" in tensors:
        offsets = read_tensor(checkpoint, "d2t")
        if offsets.shape != target_tokens.shape or offsets.dtype.kind != "i":
            raise ValueError(
                f"{path}: d2t must have an integer for each of the {config.draft_vocab_size} tokens"
                f" of the head, got {offsets.dtype} {offsets.shape!s:.80}"
            )
        target_tokens = target_tokens + offsets
    elif config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"{path}: d2t is missing, and the head has {config.draft_vocab_size} of the target's"
            f" {config.vocab_size} tokens"
        )
    inside = (target_tokens >= 0) & (target_tokens < config.vocab_size)
    if not inside.all() or len({*target_tokens.tolist()}) < len(target_tokens):
        raise ValueError(f"{path}: d2t maps tokens of the head twice, or outside the vocabulary")
    if "t2d" in tensors:
        drafted = np.asarray(read_tensor(checkpoint, "t2d"))
        if not np.array_equal(drafted, np.isin(np.arange(config.vocab_size), target_tokens)):
            raise ValueError(f"{path}: t2d and d2t contradict each other")
    return {"tokens": jnp.asarray(target_tokens, jnp.float32)}
