"""EAGLE-3 heads in files: a config and `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`."""

from collections.abc import Collection
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from stree_jax import AttentionConfig, HybridLM, MlpConfig
from stree_jax.convert import (
    AS_IS,
    TRANSFORMERS,
    TRANSPOSED,
    Checkpoint,
    Fields,
    Rule,
    head_rules,
    hf_attention,
    load_head_weights,
    open_head,
    read_tensor,
    split_mlp,
    within,
)
from stree_jax.extensions.eagle3.head import Eagle3Config, Eagle3Head
from stree_jax.heads import abstract_head, check_fits


def load(path: Path, target: HybridLM, ignore: Collection[str]) -> Eagle3Head:
    """Reads a head for its target, in the target's dtype."""
    fields, checkpoint = open_head("eagle3", path, ignore)
    tensors = checkpoint.tensors
    config = read_config(fields, len(target.config.layers), "embed_tokens.weight" in tensors)
    fields.refuse_asked()
    like = abstract_head("eagle3", config, target)
    own = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    try:
        rules = head_rules(rules_of(config), own, like, others=["tokens"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    width, tokens = zip(*((x.d_model, x.vocab_size) for x in (config, target.config)), strict=True)
    way_out = "load the target that it was trained for"
    check_fits(f"the EAGLE-3 head in {path}", way_out, width=width, tokens=tokens)
    chosen = jnp.asarray(_tokens(checkpoint, config), jnp.float32)
    return load_head_weights(checkpoint._replace(rules=rules), like, tokens=chosen)


def read_config(fields: Fields, num_layers: int, has_embedding: bool) -> Eagle3Config:
    """Returns the config of a head from its config.json."""
    aux = "eagle_aux_hidden_state_layer_ids"
    fields.null("eagle_config", "head_dim", "num_key_value_heads", "draft_vocab_size", aux)
    eagle = fields.table("eagle_config")
    eagle.null(aux)
    layers = eagle.take(aux, fields.take(aux, [2, num_layers // 2, num_layers - 3]))
    fields.check(
        isinstance(layers, list)
        and len(layers) > 0
        and all(type(layer) is int and 1 <= layer <= num_layers for layer in layers)
        and layers == sorted({*layers}),
        "eagle_aux_hidden_state_layer_ids must be ascending numbers of the target's"
        f" {num_layers} layers, got {layers!r:.80}",
    )
    fields.check(
        not eagle.flag("norm_before_fc", fields.flag("norm_before_fc", False)),
        "norm_before_fc = true is not supported",
    )
    before = eagle.flag("norm_before_residual", fields.flag("norm_before_residual", False))
    eagle.flag("use_aux_hidden_state", True)
    width = fields.integer("hidden_size")
    fields.same("target_hidden_size", width)
    fields.same("num_hidden_layers", 1)
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(1, width // num_heads))
    theta, scaling, table = fields.rope()
    table.finish()
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    fields.check(not bias and not mlp_bias, "biases in an EAGLE-3 head are not supported")
    vocab_size = fields.integer("vocab_size")
    config = Eagle3Config(
        d_model=width,
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size", vocab_size),
        inner_layers=tuple(layers),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            input_multiple=2,
            rotary_dim=head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
        ),
        mlp=MlpConfig(
            fields.integer("intermediate_size"),
            activation=fields.choice("hidden_act", "silu", {"silu": "silu"}),
        ),
        norm_eps=fields.positive("rms_norm_eps", 1e-5),
        norm_before_residual=before,
        has_embedding=has_embedding,
    )
    fields.ignore(
        "of transformers, not of the head",
        *TRANSFORMERS,
        *("model_type", "max_position_embeddings", "initializer_range", "tie_word_embeddings"),
        *("eos_token_id", "eagle_module", "speculators_config"),
    )
    eagle.finish()
    fields.finish()
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


def _tokens(checkpoint: Checkpoint, config: Eagle3Config) -> np.ndarray:
    """Returns the target's token for each token of the head."""
    path, tensors = checkpoint.path, checkpoint.tensors
    own = np.arange(config.draft_vocab_size)
    if "d2t" in tensors:
        offsets = read_tensor(checkpoint, "d2t")
        if offsets.shape != own.shape or offsets.dtype.kind != "i":
            raise ValueError(
                f"{path}: d2t must have an integer for each of the {len(own)} tokens of the head,"
                f" got {offsets.dtype} {offsets.shape!s:.80}"
            )
        own = own + offsets
    elif config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"{path}: d2t is missing, and the head has {config.draft_vocab_size} of the target's"
            f" {config.vocab_size} tokens"
        )
    inside = (own >= 0) & (own < config.vocab_size)
    if not inside.all() or len({*own.tolist()}) < len(own):
        raise ValueError(f"{path}: d2t maps tokens of the head twice, or outside the vocabulary")
    if "t2d" in tensors:
        drafted = np.asarray(read_tensor(checkpoint, "t2d"))
        if not np.array_equal(drafted, np.isin(np.arange(config.vocab_size), own)):
            raise ValueError(f"{path}: t2d and d2t contradict each other")
    return own
