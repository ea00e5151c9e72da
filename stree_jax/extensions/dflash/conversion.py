"""DFlash heads of z-lab and DSpark heads of DeepSpec in files: a config of Qwen3, and tensors."""

from collections.abc import Collection
from pathlib import Path

from stree_jax import AttentionConfig, HybridLM, MlpConfig
from stree_jax.convert import (
    AS_IS,
    TRANSFORMERS,
    TRANSPOSED,
    Fields,
    Rule,
    head_rules,
    hf_attention,
    load_head_weights,
    open_head,
    split_mlp,
    within,
)
from stree_jax.extensions.dflash.head import DFlashConfig, DFlashHead
from stree_jax.heads import abstract_head, check_fits

_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


def load(path: Path, target: HybridLM, ignore: Collection[str]) -> DFlashHead:
    """Reads a head for its target, in the target's dtype."""
    fields, checkpoint = open_head("dflash", path, ignore)
    config = read_config(fields, target, "embed_tokens.weight" in checkpoint.tensors)
    fields.refuse_asked()
    like = abstract_head("dflash", config, target)
    try:
        rules = head_rules(rules_of(config), checkpoint.tensors, like)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    width, tokens = zip(*((x.d_model, x.vocab_size) for x in (config, target.config)), strict=True)
    way_out = "load the target that it was trained for"
    check_fits(f"the DFlash head in {path}", way_out, width=width, tokens=tokens)
    return load_head_weights(checkpoint._replace(rules=rules), like)


def read_config(fields: Fields, target: HybridLM, own_tokens: bool) -> DFlashConfig:
    """Returns the config of a head from its config.json."""
    names = [str(name) for name in fields.values["architectures"]]
    shifted, table = "DSparkModel" in names[0], fields.table("dflash_config")
    known = ["Qwen3DSparkModel" if shifted else "DFlashDraftModel"]
    fields.check(names == known, f"architectures = {names!s:.80} are not supported, but {known}")

    def place(name: str) -> Fields:
        return table if table.has(name) else fields

    fields.null("final_logit_softcapping", "draft_vocab_size", "head_dim", "is_causal")
    layers = fields.integer("num_hidden_layers", most=256)
    width, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    vocab_size = fields.integer("vocab_size")
    fields.same("draft_vocab_size", vocab_size)
    place("final_logit_softcapping").same("final_logit_softcapping", 0)
    head_dim = fields.integer("head_dim", max(1, width // num_heads))
    theta, scaling, rope = fields.rope()
    rope.finish()
    bias = fields.flag("attention_bias", False)
    rank = fields.integer("markov_rank", 0, least=0)
    if rank:
        fields.choice("markov_head_type", "vanilla", {"vanilla": "vanilla"})
    has_confidence = fields.flag("enable_confidence_head", False)
    with_rows = fields.flag("confidence_head_with_markov", False)
    config = DFlashConfig(
        d_model=width,
        vocab_size=vocab_size,
        mask_token=place("mask_token_id").integer("mask_token_id", least=0, most=vocab_size - 1),
        block_size=place("block_size").integer("block_size", least=2, most=256),
        inner_layers=_inner_layers(fields, place("target_layer_ids"), target),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rotary_dim=head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        ),
        mlp=MlpConfig(
            fields.integer("intermediate_size"),
            activation=fields.choice("hidden_act", "silu", {"silu": "silu"}),
        ),
        windows=_windows(fields, layers),
        shifted=shifted,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        embedding_multiplier=place("input_embedding_scale").number("input_embedding_scale", 1.0),
        logits_multiplier=place("output_multiplier").number("output_multiplier", 1.0),
        own_tokens=own_tokens,
        markov_rank=rank,
        confidence=("both" if with_rows else "hidden") if has_confidence else "",
    )
    fields.ignore(
        "of transformers and of training, not of the head",
        *TRANSFORMERS,
        *("model_type", "max_position_embeddings", "initializer_range", "tie_word_embeddings"),
        *("eos_token_id", "max_window_layers", "use_sliding_window", "num_anchors"),
    )
    table.finish()
    fields.finish()
    return config


def _inner_layers(fields: Fields, table: Fields, target: HybridLM) -> tuple[int, ...]:
    """Returns numbers of the target's layers here, of which a layer of files may be several."""
    own, ids = len(target.config.layers), table.take("target_layer_ids")
    layers = fields.integer("num_target_layers", own)
    fields.check(
        own % layers == 0,
        f"num_target_layers = {layers} does not fit the target's {own} mixers and MLPs",
    )
    # The last one's state in transformers is the one after the final norm.
    fields.check(
        isinstance(ids, list)
        and len(ids) > 0
        and all(type(layer) is int and 0 <= layer < layers - 1 for layer in ids)
        and ids == sorted({*ids}),
        f"target_layer_ids must be ascending layers from 0 to {layers - 2}, got {ids!r:.80}",
    )
    return tuple((layer + 1) * own // layers for layer in ids)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Returns what each layer sees. Layers with a window are causal, unless the config says so."""
    fields.null("sliding_window")
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    kinds = ("full",) * layers
    if fields.has("layer_types"):
        kinds = fields.layer_kinds("layer_types", _KINDS, layers)
    sliding = [kind == "sliding" for kind in kinds]
    fields.check(window is not None or not any(sliding), "sliding_window is missing")
    if fields.has("is_causal"):
        causal = fields.flag("is_causal", False)
        fields.check(
            all(each == causal for each in sliding),
            f"is_causal = {causal} is not supported: layers with a window are causal, others not",
        )
    return tuple(window if each else None for each in sliding)


def rules_of(config: DFlashConfig) -> list[Rule]:
    """The tensors of a head, by the names of `DFlashHead`."""
    rules = [
        Rule("fc.weight", "fc.kernel", TRANSPOSED),
        Rule("hidden_norm.weight", "hidden_norm_scale"),
        Rule("norm.weight", "final_norm_scale"),
        Rule("embed_tokens.weight", "embedding", AS_IS),
        Rule("lm_head.weight", "output_head", AS_IS),
        Rule("markov_head.markov_w1.weight", "markov_embedding", AS_IS),
        Rule("markov_head.markov_w2.weight", "markov_head", AS_IS),
        Rule("confidence_head.proj.weight", "confidence_head.kernel", TRANSPOSED),
        Rule("confidence_head.proj.bias", "confidence_head.bias"),
    ]
    layer = [
        Rule("input_layernorm.weight", "attention_norm_scale"),
        Rule("self_attn.q_norm.weight", "attention.q_norm_scale"),
        Rule("self_attn.k_norm.weight", "attention.k_norm_scale"),
        *within(hf_attention(config.attention), "self_attn", "attention"),
        Rule("post_attention_layernorm.weight", "feed_forward_norm_scale"),
        *within(split_mlp(config.mlp), "mlp", "feed_forward"),
    ]
    for number in range(len(config.windows)):
        rules += within(layer, f"layers.{number}", f"layers.{number}")
    return rules
