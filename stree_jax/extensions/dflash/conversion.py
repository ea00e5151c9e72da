"""DFlash, DFlash 2 and DSpark heads in files: a config of Qwen3, and tensors."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from stree_jax import HybridLM
from stree_jax.convert import (
    TRANSPOSED,
    Fields,
    Rule,
    hf_attention,
    llama_parts,
    read_head,
    rope_values,
    split_mlp,
    within,
    write_weights,
)
from stree_jax.extensions.dflash.head import DFlashConfig, DFlashHead
from stree_jax.models import named_weights

_ARCHITECTURES = "DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel", "DSparkDraftModel"
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# The two tables of the Markov head, without candidates and with them.
_NAMES = (
    ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"),
)
_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


def load(path: Path, target: HybridLM, ignore: Collection[str]) -> DFlashHead:
    """Reads a head for its target, in the target's dtype."""
    return read_head("dflash", path, target, ignore, read_config, rules_of)


def read_config(fields: Fields, target: HybridLM, own_tokens: bool) -> DFlashConfig:
    """Returns the config of a head from its config.json."""
    if not fields.has("speculators_model_type"):
        return _read_flat(fields, target, own_tokens)
    values = _flattened(fields, target)
    flat = fields.with_own(values, "")
    config = _read_flat(flat, target, own_tokens)
    fields.absorb(flat, values)
    return config


def _flattened(fields: Fields, target: HybridLM) -> dict[str, Any]:
    """What a config of speculators says in its own way, by DeepSpec's names.

    vLLM (`algos.py`, #48639) and Modular's MAX map it so, and the trainer agrees.
    """
    fields.choice("speculators_model_type", "", {"dspark": "dspark"})
    fields.check(
        fields.has("sample_from_anchor"),
        "sample_from_anchor is missing, and readers disagree on what that means: add it to the"
        " file, true if the first place of a block has a draft",
    )
    layers = target.config.layers
    fields.check(
        all(layer.has_memory != number % 2 for number, layer in enumerate(layers)),
        "aux_hidden_state_layer_ids are numbers of layers that are a mixer and an MLP, and the"
        f" target has {target.config.kinds!s:.80}: write the config in DeepSpec's names, with"
        " num_target_layers",
    )
    layer, num_layers = fields.table("transformer_layer_config"), len(layers) // 2
    rope = layer.table("rope_parameters")
    rope.same("partial_rotary_factor", 1)  # engines obey another share, and its trainer does not
    left_out = {"partial_rotary_factor", "mrope_section"}  # the second is of images alone
    fields.ignore("of training", "speculators_config", "speculators_version", "max_anchors")
    both_ways = fields.flag("sliding_window_non_causal", False)
    after = fields.indices("aux_hidden_state_layer_ids", num_layers)
    return layer.values | {
        "rope_parameters": {name: rope.values[name] for name in rope.values.keys() - left_out},
        "num_target_layers": num_layers,
        "target_layer_ids": [number - 1 for number in after],
        **({"is_causal": False} if both_ways else {}),
    }


def _read_flat(fields: Fields, target: HybridLM, own_tokens: bool) -> DFlashConfig:
    """The same, by the names of z-lab and DeepSpec."""
    names = [str(name) for name in fields.values["architectures"]]
    fields.check(
        len(names) == 1 and names[0] in _ARCHITECTURES,
        f"architectures = {names!s:.80} are not supported, but one of {_ARCHITECTURES}",
    )
    shifted = fields.flag("sample_from_anchor", "DSpark" in names[0])
    second = "DFlash2" in names[0]
    table = fields.table("dflash_config")
    for name in ("mask_token_id", "block_size", "target_layer_ids", "markov_rank", *_SECOND):
        fields.alias(table, **{name: name})
    fields.alias(table, is_causal="causal")
    if names == ["DSparkDraftModel"]:  # says again what the others imply
        for words in (table, fields):
            for name, word in (("attention_mode", "gqa"), ("projector_type", "dspark")):
                words.choice(name, word, {word: word})
    width, vocab_size = fields.integer("hidden_size"), fields.integer("vocab_size")
    only = {
        "draft_vocab_size": vocab_size,
        "target_hidden_size": width,
        "final_logit_softcapping": 0,
        "input_embedding_scale": 1,
        "output_multiplier": 1,
    }
    for name, value in only.items():
        table.same(name, value)
        fields.same(name, value)
    sizes = {name: fields.integer(name) for name in _SECOND} if second else {}
    rank = sizes.get("selector_rank") or fields.integer("markov_rank", 0, least=0)
    if rank and not second:
        fields.choice("markov_head_type", "vanilla", {"vanilla": "vanilla"})
    reads = "markov" if fields.flag("confidence_head_with_markov", True) else "hidden"
    attention, mlp, norm_eps = llama_parts(fields, width, 1e-6)
    windows = _windows(fields, fields.integer("num_hidden_layers", most=256))
    config = DFlashConfig(
        d_model=width,
        vocab_size=vocab_size,
        mask_token=fields.integer("mask_token_id", least=0, most=vocab_size - 1),
        block_size=fields.integer("block_size", least=2, most=256),
        inner_layers=_inner_layers(fields, target),
        attention=dataclasses.replace(attention, qk_norm_eps=norm_eps),
        mlp=mlp,
        windows=windows,
        causal=_causal(fields, windows),
        shifted=shifted,
        norm_eps=norm_eps,
        own_tokens=own_tokens,
        conv_width=sizes.get("conv_kernel_size", 0),
        conv_group=sizes.get("conv_group_size", 16),
        markov_rank=rank,
        candidates=sizes.get("selector_top_k", 0),
        confidence_head=reads if fields.flag("enable_confidence_head", False) else "none",
    )
    fields.ignore("of training", "max_window_layers", "use_sliding_window", "num_anchors")
    table.finish()
    return config


def save(head: DFlashHead, target: HybridLM, path: Path, *, num_target_layers: int) -> None:
    """Writes a head as other programs read it, into an existing directory.

    Its architecture is `DFlash2DraftModel`, `Qwen3DSparkModel` or `DFlashDraftModel`.

    Args:
        head: the head.
        target: its target.
        path: the directory.
        num_target_layers: how many layers the target has in its own checkpoint.

    Raises:
        ValueError: the format has no place for something that the head has.
    """
    c, weights = head.config, dict(named_weights(head))
    of_block = {
        "block_size": c.block_size,
        "mask_token_id": c.mask_token,
        "target_layer_ids": [
            layer * num_target_layers // len(target.config.layers) - 1 for layer in c.inner_layers
        ],
    }
    name = "Qwen3DSparkModel" if c.shifted else "DFlashDraftModel"
    if c.candidates:
        name, sizes = "DFlash2DraftModel", (c.conv_width, c.conv_group, c.markov_rank, c.candidates)
        of_block |= dict(zip(_SECOND, sizes, strict=True))
    windows = {window for window in c.windows if window}
    kinds = [f"{'full' if window is None else 'sliding'}_attention" for window in c.windows]
    values = {
        "architectures": [name],
        "model_type": "qwen3",
        "dtype": jnp.dtype(head.dtype).name,
        "hidden_size": c.d_model,
        "vocab_size": c.vocab_size,
        "num_hidden_layers": len(kinds),
        "intermediate_size": c.mlp.hidden_size,
        "num_attention_heads": c.attention.num_heads,
        "num_key_value_heads": c.attention.num_kv_heads,
        "head_dim": c.attention.head_dim,
        "rms_norm_eps": c.norm_eps,
        "layer_types": kinds,
        "sliding_window": max(windows, default=None),
        "num_target_layers": num_target_layers,
        **rope_values(c.attention),
        **(of_block if c.shifted else {"dflash_config": of_block}),
    }
    if not c.causal:
        values["is_causal"] = False
    if c.shifted:
        values |= {
            "markov_rank": c.markov_rank,
            "enable_confidence_head": c.confidence_head != "none",
            "confidence_head_with_markov": c.confidence_head == "markov",
        }
    back = read_config(Fields(path, values), target, c.own_tokens)
    different = [
        field.name
        for field in dataclasses.fields(c)
        if getattr(back, field.name) != getattr(c, field.name)
    ]
    if different:
        raise ValueError(
            f"{name} has no place for this head's {', '.join(different)}; store it with save_head"
        )
    rules = [rule for rule in rules_of(c) if rule.target in weights]
    write_weights(path, rules, weights)
    (path / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _inner_layers(fields: Fields, target: HybridLM) -> tuple[int, ...]:
    """Returns numbers of the target's layers here, of which a layer of files may be several."""
    num_layers, ids = len(target.config.layers), fields.take("target_layer_ids")
    layers = fields.integer("num_target_layers")
    fields.check(
        num_layers % layers == 0,
        f"num_target_layers = {layers} does not fit the target's {num_layers} mixers and MLPs",
    )
    # The last one's state in transformers is the one after the final norm.
    fields.check(
        isinstance(ids, list)
        and len(ids) > 0
        and all(type(layer) is int and 0 <= layer < layers - 1 for layer in ids)
        and ids == sorted({*ids}),
        f"target_layer_ids must be ascending layers from 0 to {layers - 2}, got {ids!r:.80}",
    )
    return tuple((layer + 1) * num_layers // layers for layer in ids)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Returns what each layer sees of the text."""
    fields.null("sliding_window")
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    kinds = ("full",) * layers
    if fields.has("layer_types"):
        kinds = fields.layer_kinds("layer_types", _KINDS, layers)
    sliding = [kind == "sliding" for kind in kinds]
    fields.check(window is not None or not any(sliding), "sliding_window is missing")
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _causal(fields: Fields, windows: tuple[int | None, ...]) -> bool:
    """Returns whether layers with a window are causal: unless the config says that they are not."""
    causal = fields.flag("is_causal", None not in windows)
    fields.check(
        None not in windows or not causal,
        f"is_causal = {causal} is not supported in layers without a window",
    )
    return causal or not fields.has("is_causal")


def rules_of(config: DFlashConfig) -> list[Rule]:
    """The tensors of a head, by the names of `DFlashHead`."""
    rules = [
        Rule("fc.weight", "fc.kernel", TRANSPOSED),
        Rule("hidden_norm.weight", "hidden_norm_scale"),
        Rule("norm.weight", "final_norm_scale"),
        Rule("embed_tokens.weight", "embedding"),
        Rule("lm_head.weight", "output_head"),
        Rule(_NAMES[config.candidates > 0][0], "markov_embedding"),
        Rule(_NAMES[config.candidates > 0][1], "markov_head"),
        Rule("candidate_selector.hidden_projection.weight", "selector.kernel", TRANSPOSED),
        Rule("confidence_head.proj.weight", "confidence_head.kernel", TRANSPOSED),
        Rule("confidence_head.proj.bias", "confidence_head.bias"),
    ]
    layer = [
        Rule("input_layernorm.weight", "hidden_norm_scale"),
        Rule("self_attn.q_norm.weight", "attention.q_norm_scale"),
        Rule("self_attn.k_norm.weight", "attention.k_norm_scale"),
        *within(hf_attention(config.attention), "self_attn", "attention"),
        Rule("post_attention_layernorm.weight", "feed_forward_norm_scale"),
        *within(split_mlp(config.mlp), "mlp", "feed_forward"),
    ]
    conv = [
        Rule("base_kernel", "base_kernel"),
        Rule("kernel_projection.weight", "kernel_projection.kernel", TRANSPOSED),
    ]
    for name in ("attention_conv", "mlp_conv"):
        layer += within(conv, name, name)
    for number in range(len(config.windows)):
        rules += within(layer, f"layers.{number}", f"layers.{number}")
    return rules
