"""The families of checkpoints: how each is recognised, what its config means, its table of rules.

Sources: mamba_ssm's `MambaConfig` and `Mamba2`, transformers' `Mamba2Config`, Mistral's
`params.json`. A config field is used, ignored for a stated reason, or refused; none is overlooked.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.config import ModelConfig
from stree_jax.convert.rules import AS_IS, CONV, SWAPPED, TRANSPOSED, Ignored, Rule
from stree_jax.convert.tensors import Tensor
from stree_jax.layer_config import Mamba2Config, MlpConfig


class Description(NamedTuple):
    """What a checkpoint is, as its config tells."""

    family: str
    config: ModelConfig
    rules: list[Rule]
    ignored: list[Ignored]  # tensors
    notes: list[str]  # config fields that were left aside, and why


# --- Tables. The mixer's is the same in all pure Mamba-2 families.

_MIXER = (
    Rule("in_proj.weight", "in_proj.kernel", TRANSPOSED),
    Rule("in_proj.bias", "in_proj.bias"),
    Rule("conv1d.weight", "conv_weight", CONV),
    Rule("conv1d.bias", "conv_bias"),
    Rule("A_log", "A_log"),
    Rule("D", "D"),
    Rule("dt_bias", "dt_bias"),
    Rule("norm.weight", "norm_scale"),
    Rule("out_proj.weight", "out_proj.kernel", TRANSPOSED),
    Rule("out_proj.bias", "out_proj.bias"),
)

_MLP = (
    Rule("fc1.weight", "in_proj.kernel", SWAPPED),
    Rule("fc2.weight", "out_proj.kernel", TRANSPOSED),
)


def backbone_rules(layers: Iterable[str], *, embedding: str, prefix: str = "") -> list[Rule]:
    """The table of mamba_ssm, transformers' mamba2 and Codestral, which differ in few names.

    Args:
        layers: the kinds of the model's blocks; an "mlp" belongs to the source layer of the block
            before it.
        embedding: the embedding's name below the backbone.
        prefix: before every name.
    """
    rules = []
    layer = -1
    for block, kind in enumerate(layers):
        layer += kind != "mlp"
        source, target = f"{prefix}backbone.layers.{layer}", f"blocks.{block}"
        if kind == "mlp":
            rules.append(Rule(f"{source}.norm2.weight", f"{target}.norm_scale", AS_IS))
            rules += [rule.within(f"{source}.mlp", f"{target}.mixer") for rule in _MLP]
        else:
            rules.append(Rule(f"{source}.norm.weight", f"{target}.norm_scale", AS_IS))
            rules += [rule.within(f"{source}.mixer", f"{target}.mixer") for rule in _MIXER]
    return [
        *rules,
        Rule(f"{prefix}backbone.norm_f.weight", "final_norm_scale"),
        Rule(f"{prefix}backbone.{embedding}.weight", "embedding"),
        Rule(f"{prefix}lm_head.weight", "head"),
    ]


# --- Recognition.


class Layout(NamedTuple):
    """Where a checkpoint keeps its config and its weights."""

    config: str
    weights: tuple[str, ...]


_HF_LAYOUT = Layout("config.json", ("model.safetensors", "pytorch_model.bin"))
_MISTRAL_LAYOUT = Layout("params.json", ("consolidated.safetensors",))


def layout(directory: Path) -> Layout:
    """Which files belong together; Codestral's repository has both of its forms.

    Raises:
        ValueError: there is no config.
    """
    layouts = (_HF_LAYOUT, _MISTRAL_LAYOUT)
    found = [files for files in layouts if (directory / files.config).is_file()]
    if not found:
        raise ValueError(f"{directory} is not a checkpoint: it has no config.json or params.json")

    def has_weights(files: Layout) -> bool:
        names = [*files.weights, *(f"{name}.index.json" for name in files.weights)]
        return any((directory / name).is_file() for name in names)

    return next(filter(has_weights, found), found[0])


_REFUSED = {
    "Mamba-1 layers, whose state has no heads": ("mamba", "falcon_mamba", "jamba", "zamba"),
    "gated delta net layers, not Mamba-2": (
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
        "olmo_hybrid",
    ),
    "delta attention, not Mamba-2": ("kimi_linear", "bailing_hybrid", "glm5_next"),
    "RG-LRU layers, not Mamba-2": ("recurrent_gemma",),
    "Mamba-2 with attention; this version converts pure Mamba-2 only": (
        "bamba",
        "falcon_h1",
        "zamba2",
        "nemotron_h",
        "granitemoehybrid",
    ),
}


def describe(path: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Description:
    """Recognises a checkpoint.

    Args:
        path: its config file.
        values: what is in it.
        tensors: by name.

    Raises:
        ValueError: it is of no known family, of one that is refused, or its config does not fit.
    """
    if path.with_name("mamba_config.json").is_file():
        raise ValueError(
            f"{path.parent} is a MambaInLlama checkpoint, Mamba-2 with attention and MLP layers;"
            " this version converts pure Mamba-2 only"
        )
    for field in ("quantization_config", "compression_config", "quantization"):
        if values.get(field):
            raise ValueError(
                f"{path} says {field}: quantised checkpoints are not supported, use the bfloat16"
                " original"
            )
    fields = _Fields(path, values)
    model_type = values.get("model_type")
    is_mistral = "dim" in values and "n_heads" not in values and model_type in (None, "mamba")
    try:
        if "ssm_cfg" in values:
            return _mamba_ssm(fields)
        if is_mistral:
            return _codestral(fields)
        if model_type == "mamba2":
            return _hf_mamba2(fields, tensors)
    except ValueError as error:  # of `ModelConfig`, which does not know the file
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from None
    for reason, names in _REFUSED.items():
        if model_type in names:
            raise ValueError(f"{path} says model_type = {model_type!r}: {reason}")
    if "d_model" in values and "n_layer" in values:  # mamba_ssm's first release had no ssm_cfg
        raise ValueError(f"{path} has no ssm_cfg: a Mamba-1 model of mamba_ssm, not supported")
    raise ValueError(
        f"{path} is of no known family (model_type = {model_type!r}); known: mamba_ssm (ssm_cfg),"
        " transformers mamba2, Codestral (params.json)"
    )


# --- Families.


def _mamba_ssm(fields: "_Fields") -> Description:
    ssm = fields.table("ssm_cfg")
    layer = ssm.take("layer", "Mamba1")
    if layer != "Mamba2":
        raise ValueError(
            f"{fields.path}: ssm_cfg.layer is {layer!r}"
            + (" (the default)" if "layer" not in ssm.values else "")
            + "; only Mamba-2 is supported"
        )
    if fields.take("attn_layer_idx", []) != []:
        raise ValueError(
            f"{fields.path}: attn_layer_idx is not empty: Mamba-2 with attention; this version"
            " converts pure Mamba-2 only"
        )
    if not fields.flag("rms_norm", True):
        raise ValueError(f"{fields.path}: rms_norm = false (LayerNorm) is not supported")
    d_model = fields.integer("d_model")
    inner = ssm.integer("expand", 2) * d_model
    d_ssm = ssm.integer("d_ssm", inner)
    head_dim = ssm.integer("headdim", 64)
    fields.check(d_ssm % head_dim == 0, f"headdim = {head_dim} does not divide d_ssm = {d_ssm}")
    fields.check(d_ssm <= inner, f"d_ssm = {d_ssm} is larger than expand * d_model = {inner}")
    norm_first = ssm.flag("norm_before_gate", False)
    mixer = Mamba2Config(
        num_heads=d_ssm // head_dim,
        head_dim=head_dim,
        state_size=ssm.integer("d_state", 128),
        num_groups=ssm.integer("ngroups", 1),
        conv_width=ssm.integer("d_conv", 4),
        conv_bias=ssm.flag("conv_bias", True),
        in_proj_bias=ssm.flag("bias", False),
        out_proj_bias=ssm.flag("bias", False),
        mlp_dim=inner - d_ssm,
        d_per_channel=ssm.flag("D_has_hdim", False),
        dt_limit=ssm.limits("dt_limit"),
        norm=_norm_kind(ssm.flag("rmsnorm", True), norm_first),
        chunk_size=ssm.integer("chunk_size", 256),
    )
    ssm.ignore("initialisation", "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor")
    ssm.ignore("a choice of kernels", "use_mem_eff_path")
    fields.ignore("attention settings; no layer has attention", "attn_cfg")
    fields.ignore("a choice of kernels", "fused_add_norm")
    # mamba_ssm rounds the MLP up to a multiple of 128.
    hidden = -(-fields.integer("d_intermediate", 0, least=0) // 128) * 128
    num_layers = fields.integer("n_layer", most=_MAX_LAYERS)
    config = ModelConfig(
        d_model=d_model,
        layers=("mamba2", "mlp") * num_layers if hidden else ("mamba2",) * num_layers,
        mamba2=mixer,
        mlp=MlpConfig(hidden) if hidden else None,
        residual_float32=fields.flag("residual_in_fp32", True),
        **_vocabulary(fields, default_multiple=8),
    )
    notes = ssm.finish() + fields.finish()
    rules = backbone_rules(config.layers, embedding="embedding")
    return Description("mamba_ssm", config, rules, _tied_head(config, "lm_head.weight"), notes)


def _codestral(fields: "_Fields") -> Description:
    fields.take("model_type", "mamba")
    fields.check(fields.flag("rms_norm", True), "rms_norm = false (LayerNorm) is not supported")
    fields.ignore("a choice of kernels", "fused_add_norm")
    # Heads of 64, a state of 128 and an expansion of 2 are what its code does not let one choose.
    config = ModelConfig.mamba2_lm(
        d_model=fields.integer("dim"),
        num_layers=fields.integer("n_layers", most=_MAX_LAYERS),
        num_groups=fields.integer("n_groups", 1),
        chunk_size=256,
        **_vocabulary(fields, default_multiple=1),
    )
    config = dataclasses.replace(config, residual_float32=fields.flag("residual_in_fp32", True))
    notes = fields.finish()
    rules = backbone_rules(config.layers, embedding="embedding", prefix="model.")
    return Description(
        "Codestral-Mamba", config, rules, _tied_head(config, "model.lm_head.weight"), notes
    )


def _hf_mamba2(fields: "_Fields", tensors: Mapping[str, Tensor]) -> Description:
    fields.take("model_type", "mamba2")
    activation = fields.take("hidden_act", "silu")
    fields.check(activation in ("silu", "swish"), f"hidden_act is {activation!r}, not 'silu'")
    d_model = fields.integer("hidden_size", 4096)
    num_heads, head_dim = fields.integer("num_heads", 128), fields.integer("head_dim", 64)
    expand = fields.take("expand", 2)
    fields.check(
        isinstance(expand, int | float) and expand * d_model == num_heads * head_dim,
        f"expand * hidden_size = {expand} * {d_model} is not num_heads * head_dim ="
        f" {num_heads} * {head_dim}",
    )
    epsilon = fields.positive("layer_norm_epsilon", 1e-5)
    bias = fields.flag("use_bias", False)
    vocab_size = fields.integer("vocab_size", 32768)
    config = ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        layers=("mamba2",) * fields.integer("num_hidden_layers", 64, most=_MAX_LAYERS),
        mamba2=Mamba2Config(
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=fields.integer("state_size", 128),
            num_groups=fields.integer("n_groups", 8),
            conv_width=fields.integer("conv_kernel", 4),
            conv_bias=fields.flag("use_conv_bias", True),
            in_proj_bias=bias,
            out_proj_bias=bias,
            dt_limit=fields.limits("time_step_limit"),
            norm_eps=epsilon,
            chunk_size=fields.integer("chunk_size", 256),
        ),
        norm_eps=epsilon,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        residual_float32=fields.flag("residual_in_fp32", True),
        eos_token=fields.token("eos_token_id", vocab_size),
    )
    fields.ignore(
        "initialisation",
        "initializer_range",
        "rescale_prenorm_residual",
        "time_step_rank",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_scale",
    )
    fields.ignore("transformers never read it; its mixer gates first", "norm_before_gate")
    fields.ignore("transformers never read it; its mixer always norms", "rms_norm")
    fields.ignore("derived from expand * hidden_size", "intermediate_size")
    fields.ignore("of transformers, not of the model", *_TRANSFORMERS)
    notes = fields.finish()
    # The oldest conversions kept mamba_ssm's name of the embedding, which transformers renames.
    old = "backbone.embedding.weight" in tensors
    rules = backbone_rules(config.layers, embedding="embedding" if old else "embeddings")
    return Description(
        "transformers mamba2", config, rules, _tied_head(config, "lm_head.weight"), notes
    )


def _vocabulary(fields: "_Fields", *, default_multiple: int) -> dict[str, Any]:
    """mamba_ssm's vocabulary: the config has the real size, the tensors a padded one."""
    size = fields.integer("vocab_size")
    multiple = fields.integer("pad_vocab_size_multiple", default_multiple)
    return dict(
        vocab_size=size,
        padded_vocab_size=-(-size // multiple) * multiple,
        tie_embeddings=fields.flag("tie_embeddings", True),
    )


def _norm_kind(has_norm: bool, norm_first: bool) -> str:
    if not has_norm:
        return "none"
    return "norm_then_gate" if norm_first else "gate_then_norm"


def _tied_head(config: ModelConfig, name: str) -> list[Ignored]:
    return [Ignored(name, "the embedding again: tied")] if config.tie_embeddings else []


# Fields that every transformers config may have and that say nothing about the numbers.
_TRANSFORMERS = (
    "_name_or_path",
    "attn_implementation",
    "gradient_checkpointing",
    "keys_to_ignore_at_inference",
    "add_cross_attention",
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
)

_MISSING = object()
_MAX_LAYERS = 4096


class _Fields:
    """A table of config fields of which every one must be accounted for."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = ""):
        self.path = path
        self.values = values
        self._prefix = prefix
        self._left = set(values)
        self._notes: list[str] = []

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """A field's value; null counts as absent."""
        self._left.discard(name)
        value = self.values.get(name)
        if value is not None:
            return value
        self.check(default is not _MISSING, f"{self._prefix}{name} is missing")
        return default

    def integer(
        self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = 1 << 24
    ) -> int:
        value = self.take(name, default)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        self.check(
            is_int and least <= value <= most,
            f"{self._prefix}{name} must be an integer from {least} to {most}, got {value!r:.80}",
        )
        return value

    def positive(self, name: str, default: float) -> float:
        value = _number(self.take(name, default))
        self.check(
            value is not None and 0 < value < math.inf,
            f"{self._prefix}{name} must be a number above 0, got {self.values.get(name)!r:.80}",
        )
        assert value is not None
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        self.check(
            isinstance(value, bool), f"{self._prefix}{name} must be true or false, got {value!r}"
        )
        return value

    def limits(self, name: str) -> tuple[float, float]:
        """A pair of numbers, the second of which may be infinite; absent: no limits."""
        value = self.take(name, [0.0, math.inf])
        pair = [_number(part) for part in value] if isinstance(value, list | tuple) else []
        self.check(
            len(pair) == 2 and None not in pair,
            f"{self._prefix}{name} must be two numbers, got {value!r}",
        )
        return pair[0], pair[1]  # type: ignore[return-value]

    def token(self, name: str, vocab_size: int) -> int | None:
        """A token id, or the first of a list; one that cannot be used is noted."""
        value = self.take(name, None)
        first = value[0] if isinstance(value, list) and value else value
        is_id = isinstance(first, int) and not isinstance(first, bool) and 0 <= first < vocab_size
        if value is not None and (isinstance(value, list) or not is_id):
            self._notes.append(
                f"{name}: {value!r:.80}, of which {first if is_id else 'nothing'} is kept"
            )
        return first if is_id else None

    def table(self, name: str) -> "_Fields":
        value = self.take(name, {})
        self.check(isinstance(value, Mapping), f"{name} must be a table, got {value!r}")
        return _Fields(self.path, value, f"{name}.")

    def ignore(self, reason: str, *names: str) -> None:
        """Sets fields aside; those that are there are reported."""
        found = sorted(self._left & set(names))
        self._left -= set(found)
        if found:
            self._notes.append(f"{', '.join(self._prefix + name for name in found)}: {reason}")

    def finish(self) -> list[str]:
        """What was set aside.

        Raises:
            ValueError: a field that nobody knows; it might change the numbers.
        """
        # Names that begin so are transformers' private matters.
        unknown = sorted(self._prefix + name for name in self._left if name[:1] != "_")
        self.check(not unknown, f"unknown fields {unknown}; they might change what is computed")
        return self._notes

    def check(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.path}: {message}")


def _number(value: Any) -> float | None:
    """A number in either dialect: `Infinity` itself, or transformers 5's `{"__float__": ...}`."""
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        return math.inf if value["__float__"] == "Infinity" else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Integers of any size are JSON too, and float() refuses some.
    return float(value) if is_number and (-1e300 < value < 1e300 or value == math.inf) else None
