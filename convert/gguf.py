"""GGUF files as the checkpoints of transformers that llama.cpp's converter made them from.

What it does to names, tensors and configs (`conversion/` there, as of November 2026) is undone
here, so that families need not know of it.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.checkpoint.files import has_file, read_json
from stree_jax.checks import check_int
from stree_jax.convert.families import text_tables
from stree_jax.convert.fields import MAX_LAYERS
from stree_jax.convert.gguf_file import open_parts
from stree_jax.messages import shown

Shape = tuple[int, ...]
Values = dict[str, Any]  # of config.json


# What files of this library say of queries and keys: RoPE turns so many first channels of a head,
# and the two that it turns together are neighbours. In files of llama.cpp's converter all channels
# lie so, whatever is turned.
TURNED = "stree_jax.turned_channels"
_ASSUMED = (
    "queries and keys are taken to be in the order of llama.cpp's converter, which this file does"
    " not say; if they are in another one, texts are wrong"
)


def open_gguf(file: Path) -> tuple[Path, Values, dict[str, Tensor], str, list[str]]:
    """Opens a GGUF file as a checkpoint of transformers.

    Args:
        file: the file, or a part of it.

    Returns:
        The file of the config: config.json beside it, else the file itself, from whose metadata
        the config is made; the config; the tensors by transformers' names; how many are quantised,
        and how; and what is assumed.

    Raises:
        ValueError: a file is damaged, the package `gguf` is missing, the architecture is not one of
            ours, the metadata says too little or something unknown, or a tensor is unknown.
    """
    metadata, tensors, quantised = open_parts(file)
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ValueError(
            f"{file} is of the architecture {shown(name)}; GGUF files are read of"
            f" {', '.join(_ARCHITECTURES)}"
        )
    architecture, facts = _ARCHITECTURES[name], _Facts(file, name, metadata, tensors)
    beside = file.with_name("config.json")
    if has_file(beside):
        values = read_json(beside)
        layout = architecture.layout(facts, values)
        _check_sizes(layout, facts, beside, values)
        return beside, values, _renamed(layout, facts), quantised, _assumed(values, facts)
    values = architecture.config(facts)
    facts.refuse_unknown()
    layout = architecture.layout(facts, values)
    return file, values, _renamed(layout, facts), quantised, _assumed(values, facts)


def _assumed(values: Values, facts: "_Facts") -> list[str]:
    """What no file says. In the converter's order llama.cpp itself gets Bamba wrong."""
    is_open = values.get("model_type") == "bamba" and facts.turned is None
    return [_ASSUMED] if is_open and facts.has("attn_q.weight") else []


class _Facts:
    """The metadata and the tensors of a file.

    Args:
        file: its path, for messages.
        architecture: with its name keys begin.
        metadata: by key.
        tensors: by llama.cpp's names.
    """

    def __init__(
        self,
        file: Path,
        architecture: str,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ):
        self.file, self.tensors = file, tensors
        self.architecture = architecture
        self._prefix, self._metadata, self._used = f"{architecture}.", metadata, {*_REDUNDANT}
        self.turned = metadata.get(TURNED)
        blocks = self.size("block_count", most=MAX_LAYERS)
        # The last ones are a head that predicts further tokens.
        self.num_heads = self.size("nextn_predict_layers", 0, least=0, most=blocks - 1)
        self.num_layers = blocks - self.num_heads

    def take(self, key: str, default: Any = ...) -> Any:
        """The value of one of the architecture's keys; without a default it must be there."""
        self._used.add(key)
        value = self._metadata.get(self._prefix + key)
        if value is None and default is ...:
            raise self.lacks(self._prefix + key)
        return default if value is None else value

    def lacks(self, what: str) -> ValueError:
        """The error of a fact that the metadata does not have."""
        return ValueError(f"{self.file} lacks {what}: put the model's config.json beside it")

    def size(self, key: str, default: Any = ..., *, least: int = 1, most: int = 1 << 24) -> int:
        """An integer."""
        name = f"{self.file}: {self._prefix}{key}"
        return check_int(name, self.take(key, default), least, most)

    def fields(self, **keys: str) -> Values:
        """Fields of a config by the keys that have their values."""
        return {field: self.take(key) for field, key in keys.items()}

    def has(self, name: str) -> bool:
        """Whether a layer has a tensor."""
        return any(f"blk.{i}.{name}" in self.tensors for i in range(self.num_layers))

    def columns(self, *names: str) -> int:
        """Columns of a matrix, of the first of these that a layer has."""
        names = tuple(f"blk.{i}.{name}" for name in names for i in range(self.num_layers))
        found = (self.tensors[name].shape for name in names if name in self.tensors)
        return next((shape[-1] for shape in found), 1)

    def kinds(self, names: Mapping[str, str]) -> list[str]:
        """The kind of each layer by a tensor that only layers of that kind have.

        The layers that metadata say are not always right: older versions of the converter forget
        Nemotron-H's MLPs.
        """
        layers = range(self.num_layers)
        found = [[names[x] for x in names if f"blk.{i}.{x}" in self.tensors] for i in layers]
        if [] in found:
            raise ValueError(f"{self.file}: layer {found.index([])} has none of {', '.join(names)}")
        return [each[0] for each in found]

    def kv_heads(self) -> int:
        """Heads of keys. Layers without attention have 0 in a list."""
        key = "attention.head_count_kv"
        value, name = self.take(key), f"{self.file}: {self._prefix}{key}"
        found = {each for each in value if each} if isinstance(value, list) else {value}
        if len(found) != 1:
            raise ValueError(f"{name} = {value!s:.80} differs among layers")
        return check_int(name, min(found), 1)

    def common(self, model_type: str) -> Values:
        """Fields of all configs."""
        if "token_embd.weight" not in self.tensors:
            raise ValueError(f"{self.file} has no tensor token_embd.weight")
        return {
            "model_type": model_type,
            "hidden_size": self.size("embedding_length"),
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
        }

    def mixer(self) -> Values:
        """Fields of the mixer of Bamba, Granite and Falcon-H1."""
        heads, inner = self.size("ssm.time_step_rank"), self.size("ssm.inner_size")
        return {
            "mamba_n_heads": heads,
            "mamba_d_head": inner // heads,
            "mamba_expand": max(1, inner // self.size("embedding_length")),
            "mamba_conv_bias": self.has("ssm_conv1d.bias"),
            "mamba_proj_bias": self.has("ssm_in.bias"),
        } | self.fields(
            mamba_d_state="ssm.state_size",
            mamba_n_groups="ssm.group_count",
            mamba_d_conv="ssm.conv_kernel",
            rms_norm_eps="attention.layer_norm_rms_epsilon",
        )

    def attention(self) -> Values:
        """Fields of attention."""
        heads = self.size("attention.head_count")
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": self.kv_heads(),
            "head_dim": self.size("attention.key_length", self.size("embedding_length") // heads),
            "attention_bias": self.has("attn_q.bias"),
        }

    def rope(self) -> Values:
        """Fields of RoPE; a scaling is refused by its name when the config is read."""
        if "rope_freqs.weight" in self.tensors:
            raise self.lacks("the numbers behind its rope_freqs.weight")
        kind = self.take("rope.scaling.type", "none")
        return {
            "rope_theta": self.take("rope.freq_base", 10000.0),
            "rope_scaling": None if kind == "none" else {"rope_type": kind},
            "max_position_embeddings": self.take("context_length", None),
        }

    def refuse_unknown(self) -> None:
        """Refuses keys that nobody has read, since they might change what is computed."""
        known = {self._prefix + key for key in self._used}
        own = {key for key in self._metadata if key.startswith(self._prefix)}
        if unknown := sorted(own - known):
            raise ValueError(
                f"{self.file} has unknown metadata {unknown!s:.200}, which might change what is"
                " computed: put the model's config.json beside it"
            )


# Keys that change nothing here, or repeat what tensors say.
_REDUNDANT = {
    *("vocab_size", "context_length", "feed_forward_length", "expert_feed_forward_length"),
    *("expert_shared_feed_forward_length", "expert_shared_count", "expert_gating_func"),
    *("attention.key_length", "attention.value_length", "attention.layer_norm_epsilon"),
    *("attention.recurrent_layers", "full_attention_interval", "ssm.dt_b_c_rms"),
    *("rope.freq_base", "rope.dimension_count", "rope.dimension_sections"),
    *("rope.scaling.finetuned", "rope.scaling.type", "attention.head_count"),
    *("expert_count", "expert_used_count", "expert_group_count"),
}


class _Change(NamedTuple):
    """A function that undoes what the converter does to a tensor, and its effect on shapes."""

    apply: Callable[[np.ndarray], np.ndarray]
    shape: Callable[[Shape], Shape] = lambda shape: shape


def _log(x: np.ndarray) -> np.ndarray:
    return np.log(-x.astype(np.float32))


_FLAT = _Change(np.ravel, lambda shape: (math.prod(shape),))
_MINUS_ONE = _Change(lambda scale: scale.astype(np.float32) - 1)
# By llama.cpp's names; of all families, after their own.
_CHANGES = {
    "ssm_a": (_FLAT, _Change(_log)),
    "ssm_d": (_FLAT,),
    "ssm_norm.weight": (_FLAT,),
    "ssm_conv1d.weight": (_Change(lambda x: x[:, None], lambda shape: (shape[0], 1, *shape[1:])),),
    "ffn_gate_inp_shexp.weight": (
        _Change(lambda x: x.reshape(1, -1), lambda shape: (1, math.prod(shape))),
    ),
}


def _halves_apart(heads: int, turned: int | None) -> _Change:
    """The first channels of heads, or all, as transformers pairs them: there neighbours are one."""

    def apply(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(heads, -1, *x.shape[1:])
        first, rest = np.split(rows, [rows.shape[1] if turned is None else turned], axis=1)
        pairs = first.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(first.shape)
        return np.concatenate([pairs, rest], axis=1).reshape(x.shape)

    return _Change(apply)


def _by_group(groups: int, heads: int, first: int = 0, *, columns: bool = False) -> _Change:
    """Heads of values group by group, where llama.cpp has the first of each group first.

    Args:
        groups: groups, whose heads share a key.
        heads: heads of all.
        first: rows before those of the heads.
        columns: whether they are columns instead.
    """

    def apply(x: np.ndarray) -> np.ndarray:
        x = x.T if columns else x
        own = x[first:].reshape(heads // groups, groups, -1, *x.shape[1:]).swapaxes(0, 1)
        x = np.concatenate([x[:first], own.reshape(-1, *x.shape[1:])])
        return x.T if columns else x

    return _Change(apply)


def _interleaved(groups: int, keys: int, values: int) -> _Change:
    """Rows of q, k, v and z group by group, as Qwen3-Next has them; there they are one by one."""

    def apply(x: np.ndarray) -> np.ndarray:
        parts = np.split(x, np.cumsum([keys, keys, values]))
        of_group = [part.reshape(groups, -1, *x.shape[1:]) for part in parts]
        return np.concatenate(of_group, axis=1).reshape(x.shape)

    return _Change(apply)


class _Layout(NamedTuple):
    """Names and changes of tensors.

    Attributes:
        layer: what names in layer {} begin with.
        outside: names of tensors outside of layers, by llama.cpp's.
        inside: names of tensors in a layer. Several that are joined by "+" are one here, rows
            behind rows.
        changes: what undoes the converter's changes, in this order.
        head: names of tensors of a head that predicts further tokens.
        sizes: by which numbers are changed, by the fields of a config that say them too.
    """

    layer: str
    outside: dict[str, str]
    inside: dict[str, str]
    changes: Mapping[str, tuple[_Change, ...]] = MappingProxyType({})
    head: Mapping[str, str] = MappingProxyType({})
    sizes: Mapping[str, int] = MappingProxyType({})


class _Architecture(NamedTuple):
    """How to read the files of an architecture: a config from metadata; the layout of tensors."""

    config: Callable[[_Facts], Values]
    layout: Callable[[_Facts, Values], _Layout]


def _check_sizes(layout: _Layout, facts: _Facts, path: Path, values: Values) -> None:
    """Refuses a config with other sizes: weights would be other ones, of fitting shapes."""
    for table in (values, *filter(None, map(values.get, text_tables()))):
        for field, size in layout.sizes.items():
            if isinstance(table, Mapping) and table.get(field) not in (None, size):
                raise ValueError(
                    f"{path} says {field} = {shown(table[field])}, and {facts.file} {size}: get the"
                    " config.json that belongs to it"
                )


def _renamed(layout: _Layout, facts: _Facts) -> dict[str, Tensor]:
    """The tensors by transformers' names."""
    wanted = [("", own, name) for own, name in layout.outside.items()]
    for i in range(facts.num_layers + facts.num_heads):
        is_head = i >= facts.num_layers
        begin = "mtp.layers.0" if is_head else layout.layer.format(i)
        inside = {own: f"{begin}.{name}" for own, name in layout.inside.items()}
        inside |= layout.head if is_head else {}
        wanted += [(f"blk.{i}.", own, name) for own, name in inside.items()]
    left = {*facts.tensors} - {"rope_freqs.weight"}  # of which config.json has the numbers
    found = {}
    for begin, own, name in wanted:
        sources = [begin + part for part in own.split("+")]
        if left.issuperset(sources):
            if name in found:
                raise ValueError(f"{facts.file} has {name} twice, also as {shown(begin + own)}")
            left -= {*sources}
            changes = (*layout.changes.get(own, ()), *_CHANGES.get(own, ()))
            parts = [facts.tensors[source] for source in sources]
            found[name] = _changed(f"{facts.file}: {name}", parts, changes)
    if left:
        raise ValueError(f"{facts.file} has unknown tensors: {sorted(left)[:3]!s:.200}")
    return found


def _changed(name: str, parts: list[Tensor], changes: tuple[_Change, ...]) -> Tensor:
    """The tensor of this name that parts become, rows behind rows."""
    shape = parts[0].shape
    axis = max(0, len(shape) - 2)
    others = [(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts]
    if len({*others}) > 1:
        raise ValueError(f"{name}: shapes {[part.shape for part in parts]!s:.80} do not fit")
    shape = (*shape[:axis], sum(part.shape[axis] for part in parts), *shape[axis + 1 :])
    for change in changes:
        shape = change.shape(shape)

    dtypes = {part.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def read() -> np.ndarray:
        arrays = [part.read().astype(dtype, copy=False) for part in parts]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)
        for change in changes:
            array = change.apply(array)
        return array

    return Tensor(shape, dtype, read)


def _table(names: str, within: str = "") -> dict[str, str]:
    """A table of names: "there here", of matrices and their biases; "a+b" are two that are one."""
    begin = f"{within}." if within else ""
    return {
        "+".join(f"{own}.{part}" for own in there.split("+")): f"{begin}{here}.{part}"
        for there, here in (line.split() for line in names.split(","))
        for part in ("weight", "bias")
    }


def _mixer(within: str) -> dict[str, str]:
    """Names of the state space mixers."""
    names = "ssm_in in_proj, ssm_conv1d conv1d, ssm_norm norm, ssm_out out_proj"
    scalars = {"ssm_dt.bias": "dt_bias", "ssm_a": "A_log", "ssm_d": "D"}
    return _table(names, within) | {own: f"{within}.{name}" for own, name in scalars.items()}


def _attention(within: str) -> dict[str, str]:
    names = "attn_q q_proj, attn_k k_proj, attn_v v_proj, attn_output o_proj"
    return _table(names, within)


def _outside(embedding: str, norm: str) -> dict[str, str]:
    return _table(f"token_embd {embedding}, output_norm {norm}, output lm_head")


def _unpaired(facts: _Facts) -> dict[str, Any]:
    """What undoes the order of queries and keys, which all of these get, with RoPE or without."""
    if not facts.has("attn_q.weight"):
        return {}
    heads = {"attn_q": facts.size("attention.head_count"), "attn_k": facts.kv_heads()}
    if facts.turned is not None:
        check_int(f"{facts.file}: {TURNED}", facts.turned, 0, 1 << 16)
    changes = {
        f"{name}.{part}": (_halves_apart(count, facts.turned),)
        for name, count in heads.items()
        for part in ("weight", "bias")
    }
    fields = ("num_attention_heads", "num_key_value_heads")
    return {"changes": changes, "sizes": dict(zip(fields, heads.values(), strict=True))}


def _mamba2_config(facts: _Facts) -> Values:
    heads, inner = facts.size("ssm.time_step_rank"), facts.size("ssm.inner_size")
    return (
        facts.common("mamba2")
        | {
            "num_heads": heads,
            "head_dim": inner // heads,
            "expand": inner / facts.size("embedding_length"),
            "use_conv_bias": facts.has("ssm_conv1d.bias"),
            "use_bias": facts.has("ssm_in.bias"),
        }
        | facts.fields(
            state_size="ssm.state_size",
            n_groups="ssm.group_count",
            conv_kernel="ssm.conv_kernel",
            layer_norm_epsilon="attention.layer_norm_rms_epsilon",
        )
    )


def _mamba2(facts: _Facts, values: Values) -> _Layout:
    inside = _table("attn_norm norm") | _mixer("mixer")
    return _Layout("backbone.layers.{}", _outside("backbone.embeddings", "backbone.norm_f"), inside)


def _granite_config(facts: _Facts) -> Values:
    """Bamba, or Granite 4, which has scales and mostly no RoPE."""
    scales = {
        "embedding_multiplier": facts.take("embedding_scale", None),
        "residual_multiplier": facts.take("residual_scale", None),
        "attention_multiplier": facts.take("attention.scale", None),
        "logits_scaling": facts.take("logit_scale", None),
    }
    kinds = facts.kinds({"ssm_in.weight": "mamba", "attn_q.weight": "attention"})
    made = facts.mixer() | facts.attention() | facts.rope()
    has_rope = facts.take("rope.scaling.finetuned", True)
    if has_rope and not any(scales.values()):
        return (
            facts.common("bamba")
            | made
            | {
                "attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == "attention"],
                "intermediate_size": facts.columns("ffn_down.weight"),
                "mlp_bias": facts.has("ffn_up.bias"),
            }
        )
    # There 0 is none: the usual scale of attention, which transformers' config must say.
    scales["attention_multiplier"] = scales["attention_multiplier"] or made["head_dim"] ** -0.5
    experts = facts.size("expert_count", 0, least=0)
    return (
        facts.common("granitemoehybrid")
        | made
        | {field: scale for field, scale in scales.items() if scale}
        | {
            "layer_types": kinds,
            "position_embedding_type": "rope" if has_rope else "nope",
            "num_local_experts": experts,
            "num_experts_per_tok": facts.take("expert_used_count") if experts else 0,
            "intermediate_size": facts.columns("ffn_down_exps.weight"),
            "shared_intermediate_size": facts.columns("ffn_down_shexp.weight", "ffn_down.weight"),
        }
    )


def _granite(facts: _Facts, values: Values) -> _Layout:
    inside = _mixer("mamba") | _attention("self_attn")
    if values.get("model_type") == "bamba":
        mlp = "ffn_gate gate_proj, ffn_up up_proj, ffn_down down_proj"
        norms, final = "attn_norm input_layernorm, ffn_norm pre_ff_layernorm", "final_layernorm"
        inside |= _table(mlp, "feed_forward")
    else:
        norms, final = "attn_norm input_layernorm, ffn_norm post_attention_layernorm", "norm"
        dense, shared = (
            f"ffn_gate{of}+ffn_up{of} input_linear, ffn_down{of} output_linear"
            for of in ("", "_shexp")
        )
        experts = (
            "ffn_gate_exps+ffn_up_exps input_linear, ffn_down_exps output_linear,"
            " ffn_gate_inp router.layer"
        )
        inside |= _table(f"{dense}, {shared}", "shared_mlp") | _table(experts, "block_sparse_moe")
    outside = _outside("model.embed_tokens", f"model.{final}")
    return _Layout("model.layers.{}", outside, inside | _table(norms), **_unpaired(facts))


def _falcon_h1_config(facts: _Facts) -> Values:
    common = facts.common("falcon_h1")
    if common["tie_word_embeddings"]:
        raise facts.lacks("the multiplier of logits, as its head is tied to the embedding")
    if facts.has("ssm_norm.weight"):
        raise facts.lacks("the order of norm and gate in its mixers")
    return (
        common
        | facts.mixer()
        | facts.attention()
        | facts.rope()
        | {
            "intermediate_size": facts.columns("ffn_down.weight"),
            "mamba_d_ssm": facts.size("ssm.inner_size"),
        }
    )


def _falcon_h1(facts: _Facts, values: Values) -> _Layout:
    inside = (
        _mixer("mamba")
        | _attention("self_attn")
        | _table("ffn_gate gate_proj, ffn_up up_proj, ffn_down down_proj", "feed_forward")
        | _table("attn_norm input_layernorm, ffn_norm pre_ff_layernorm")
        | {"ffn_norm": "pre_ff_layernorm.weight"}
    )
    # Biases are multiplied there too, which those of transformers are not: refused as unknown.
    kept = ("ssm_conv1d.bias", "ssm_dt.bias")
    inside = {own: name for own, name in inside.items() if own[-5:] != ".bias" or own in kept}
    outside = _outside("model.embed_tokens", "model.final_layernorm")
    sizes = {
        "mamba_d_ssm": facts.size("ssm.inner_size"),
        "mamba_n_groups": facts.size("ssm.group_count"),
        "mamba_d_state": facts.size("ssm.state_size"),
    }
    changes = _undone_multipliers(values, *sizes.values())
    return _Layout("model.layers.{}", outside, inside, changes, sizes=sizes)


def _undone_multipliers(
    values: Values, inner: int, groups: int, state_size: int
) -> dict[str, tuple[_Change, ...]]:
    """What divides the weights by the multipliers of config.json; of metadata alone there are none.

    Tensors are read after the config, which is checked by then. A multiplier of 0 stays in them.
    """
    states = groups * state_size

    def factor(name: str) -> float:
        return values.get(f"{name}_multiplier") or 1.0

    def divided(*names: str) -> tuple[_Change]:
        return (_Change(lambda x: x / np.float32(math.prod(map(factor, names)))),)

    def of_list(name: str, i: int) -> float:
        return (values.get(name) or [1.0] * 5)[i] or 1.0

    def sections(x: np.ndarray) -> np.ndarray:
        parts = np.split(x, np.cumsum([inner, inner, states, states]))
        by = [factor("ssm_in") * of_list("ssm_multipliers", i) for i in range(5)]
        return np.concatenate([part / np.float32(y) for part, y in zip(parts, by, strict=True)])

    changes = {
        "attn_q": divided("attention_in"),
        "attn_k": divided("attention_in", "key"),
        "attn_v": divided("attention_in"),
        "attn_output": divided("attention_out"),
        "ssm_in": (_Change(sections),),
        "ssm_out": divided("ssm_out"),
        "ffn_gate": (_Change(lambda x: x / np.float32(of_list("mlp_multipliers", 0))),),
        "ffn_down": (_Change(lambda x: x / np.float32(of_list("mlp_multipliers", 1))),),
        "token_embd": divided("embedding"),
        "output": divided("lm_head"),
    }
    return {f"{name}.weight": change for name, change in changes.items()}


_PATTERN = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E", "ffn_up": "-"}


def _nemotron_config(facts: _Facts) -> Values:
    heads = facts.size("ssm.time_step_rank")
    kinds = facts.kinds({f"{name}.weight": kind for name, kind in _PATTERN.items()})
    values = (
        facts.common("nemotron_h")
        | {
            "hybrid_override_pattern": "".join(kinds),
            "mamba_num_heads": heads,
            "mamba_head_dim": facts.size("ssm.inner_size") // heads,
            "use_conv_bias": facts.has("ssm_conv1d.bias"),
            "use_bias": facts.has("ssm_in.bias"),
            "intermediate_size": facts.columns("ffn_down.weight"),
            "mlp_bias": facts.has("ffn_up.bias"),
            "num_nextn_predict_layers": facts.num_heads,
        }
        | facts.fields(
            ssm_state_size="ssm.state_size",
            n_groups="ssm.group_count",
            conv_kernel="ssm.conv_kernel",
            layer_norm_epsilon="attention.layer_norm_rms_epsilon",
        )
        | facts.attention()
    )
    if "E" not in kinds:
        return values
    groups = facts.size("expert_group_count", 1)
    return (
        values
        | facts.fields(
            n_routed_experts="expert_count",
            num_experts_per_tok="expert_used_count",
            norm_topk_prob="expert_weights_norm",
            routed_scaling_factor="expert_weights_scale",
        )
        | {
            "n_group": groups,
            "topk_group": facts.take("expert_group_used_count", 1 if groups == 1 else ...),
            "moe_intermediate_size": facts.columns("ffn_down_exps.weight"),
            "moe_shared_expert_intermediate_size": facts.columns("ffn_down_shexp.weight"),
            "moe_latent_size": facts.take("moe_latent_size", None),
        }
    )


def _nemotron(facts: _Facts, values: Values) -> _Layout:
    names = (
        "ffn_up up_proj, ffn_down down_proj, ffn_gate_inp gate,"
        " ffn_up_shexp shared_experts.up_proj, ffn_down_shexp shared_experts.down_proj,"
        " ffn_latent_down fc1_latent_proj, ffn_latent_up fc2_latent_proj"
    )
    after = _table(names, "mixer") | {
        "ffn_up_exps.weight": "mixer.experts.up_proj",
        "ffn_down_exps.weight": "mixer.experts.down_proj",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    }
    inside = _table("attn_norm norm") | _mixer("mixer") | _attention("mixer") | after
    # The layer of the head is two here: attention, and experts.
    first = "nextn.enorm enorm, nextn.hnorm hnorm, nextn.eh_proj eh_proj"
    last = "post_attention_norm norm, nextn.shared_head_norm final_layernorm"
    head = _table(first, "mtp.layers.0") | _table(last, "mtp.layers.1")
    head |= {own: f"mtp.layers.1.{name}" for own, name in after.items()}
    outside = _outside("backbone.embeddings", "backbone.norm_f")
    return _Layout("backbone.layers.{}", outside, inside, head=head, **_unpaired(facts))


def _qwen_config(model_type: str) -> Callable[[_Facts], Values]:
    def config(facts: _Facts) -> Values:
        heads = facts.size("ssm.time_step_rank")
        kinds = facts.kinds({"ssm_a": "linear_attention", "attn_q.weight": "full_attention"})
        made = facts.common(model_type) | facts.attention() | facts.rope()
        made |= {
            "partial_rotary_factor": facts.size("rope.dimension_count") / made["head_dim"],
            "layer_types": kinds,
            "linear_num_value_heads": heads,
            "linear_value_head_dim": facts.size("ssm.inner_size") // heads,
            "mtp_num_hidden_layers": facts.num_heads,
        } | facts.fields(
            linear_num_key_heads="ssm.group_count",
            linear_key_head_dim="ssm.state_size",
            linear_conv_kernel_dim="ssm.conv_kernel",
            rms_norm_eps="attention.layer_norm_rms_epsilon",
        )
        if not facts.has("ffn_gate_inp.weight"):
            return made | {"intermediate_size": facts.columns("ffn_down.weight")}
        return (
            made
            | facts.fields(num_experts="expert_count", num_experts_per_tok="expert_used_count")
            | {
                "moe_intermediate_size": facts.columns("ffn_down_exps.weight"),
                "shared_expert_intermediate_size": facts.columns("ffn_down_shexp.weight"),
            }
        )

    return config


def _qwen(facts: _Facts, values: Values) -> _Layout:
    groups, heads = facts.size("ssm.group_count"), facts.size("ssm.time_step_rank")
    key_size, inner = facts.size("ssm.state_size"), facts.size("ssm.inner_size")
    keys, sizes = (
        groups * key_size,
        {
            "linear_num_key_heads": groups,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": key_size,
            "linear_value_head_dim": inner // heads,
        },
    )
    norms = "attn_norm input_layernorm, post_attention_norm post_attention_layernorm"
    of_heads = "attn_q_norm q_norm, attn_k_norm k_norm"
    mlp = (
        "ffn_gate gate_proj, ffn_up up_proj, ffn_down down_proj, ffn_gate_inp gate,"
        " ffn_gate_inp_shexp shared_expert_gate, ffn_gate_shexp shared_expert.gate_proj,"
        " ffn_up_shexp shared_expert.up_proj, ffn_down_shexp shared_expert.down_proj"
    )
    inside = (
        _table(norms)
        | _attention("self_attn")
        | _table(of_heads, "self_attn")
        | _table(mlp, "mlp")
        | {
            "ffn_gate_exps.weight+ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
        }
        | _mixer("linear_attn")
    )
    if facts.architecture == "qwen3next":
        whole = "attn_qkv.weight+attn_gate.weight"
        changes = {whole: (_interleaved(groups, keys, inner),)}
        inside |= {whole: "linear_attn.in_proj_qkvz.weight"}
        inside |= _table("ssm_in in_proj_qkvz, ssm_ba in_proj_ba", "linear_attn")  # old: ssm_in
    else:
        parts = "attn_qkv in_proj_qkv, attn_gate in_proj_z, ssm_beta in_proj_b, ssm_alpha in_proj_a"
        inside |= _table(parts, "linear_attn")
        names = ("attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias", "ssm_a")
        changes = {name: (_by_group(groups, heads),) for name in names}
        for name in ("attn_qkv.weight", "ssm_conv1d.weight"):
            changes[name] = (_by_group(groups, heads, 2 * keys),)
        changes["ssm_out.weight"] = (_by_group(groups, heads, columns=True),)
    of_norms = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
    for name in (*of_norms, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"):
        changes[f"{name}.weight"] = (_MINUS_ONE,)
    outside = _outside("model.embed_tokens", "model.norm")
    head = (
        "nextn.eh_proj fc, nextn.enorm pre_fc_norm_embedding, nextn.hnorm pre_fc_norm_hidden,"
        " nextn.shared_head_norm norm, nextn.embed_tokens embed_tokens,"
        " nextn.shared_head_head lm_head"
    )
    return _Layout("model.layers.{}", outside, inside, changes, _table(head, "mtp"), sizes)


_ARCHITECTURES = {
    "mamba2": _Architecture(_mamba2_config, _mamba2),
    "granitehybrid": _Architecture(_granite_config, _granite),
    "falcon-h1": _Architecture(_falcon_h1_config, _falcon_h1),
    "nemotron_h": _Architecture(_nemotron_config, _nemotron),
    "nemotron_h_moe": _Architecture(_nemotron_config, _nemotron),
    "qwen3next": _Architecture(_qwen_config("qwen3_next"), _qwen),
    "qwen35": _Architecture(_qwen_config("qwen3_5_text"), _qwen),
    "qwen35moe": _Architecture(_qwen_config("qwen3_5_moe_text"), _qwen),
}
