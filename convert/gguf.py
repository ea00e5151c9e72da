"""GGUF files as the checkpoints of transformers that llama.cpp's converter made them from.

What it does to names and tensors (`conversion/` there, as of November 2026) is undone here, so that
families need not know of it. The config is the model's config.json, which lies beside the file.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.matmul import GROUP
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
    """Opens a file, or a part of one, as a checkpoint of transformers.

    The config file and its content; the tensors by transformers' names; how many are quantised, and
    how; and what is assumed.
    """
    metadata, tensors, quantised = open_parts(file)
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _LAYOUTS:
        raise ValueError(
            f"{file} is of the architecture {shown(name)}; GGUF files are read of"
            f" {', '.join(_LAYOUTS)}"
        )
    config = file.with_name("config.json")
    if not has_file(config):
        raise ValueError(f"{file} has no config.json beside it: put that of the model there")
    facts, values = _Facts(file, name, metadata, tensors), read_json(config)
    layout = _LAYOUTS[name](facts, values)
    _check_sizes(layout, facts, config, values)
    # In the converter's order llama.cpp itself gets Bamba wrong.
    is_open = values.get("model_type") == "bamba" and facts.turned is None
    assumed = [_ASSUMED] if is_open and facts.has("attn_q.weight") else []
    return config, values, _renamed(layout, facts), quantised, assumed


class _Facts:
    """The metadata and the tensors of a file; keys begin with its architecture."""

    def __init__(
        self,
        file: Path,
        architecture: str,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ):
        self.file, self.architecture, self.tensors = file, architecture, tensors
        self._metadata, self.turned = metadata, metadata.get(TURNED)
        blocks = self.size("block_count", most=MAX_LAYERS)
        # The last ones are a head that predicts further tokens.
        self.num_heads = self.size("nextn_predict_layers", 0, least=0, most=blocks - 1)
        self.num_layers = blocks - self.num_heads

    def size(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = 1 << 24
    ) -> int:
        """An integer among the metadata of the architecture."""
        name = f"{self.architecture}.{key}"
        return check_int(f"{self.file}: {name}", self._metadata.get(name, default), least, most)

    def has(self, name: str) -> bool:
        """True if a layer has a tensor."""
        return any(f"blk.{i}.{name}" in self.tensors for i in range(self.num_layers))

    def kv_heads(self) -> int:
        """Heads of keys. Layers without attention have 0 in a list."""
        name = f"{self.architecture}.attention.head_count_kv"
        value = self._metadata.get(name)
        counts = {count for count in value if count} if isinstance(value, list) else {value}
        if len(counts) != 1:
            raise ValueError(f"{self.file}: {name} = {value!s:.80} differs among layers")
        return check_int(f"{self.file}: {name}", counts.pop(), 1)


class _Change(NamedTuple):
    """A function that undoes the converter's change of a tensor, and its effect on shapes."""

    apply: Callable[[np.ndarray], np.ndarray]
    shape: Callable[[Shape], Shape] = lambda shape: shape
    keeps_groups: bool = True  # of 32 numbers in the last axis, and the numbers


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
    """First channels of heads, or all, in transformers' pairs: there neighbours are one."""

    def apply(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(heads, -1, *x.shape[1:])
        first, kept = np.split(rows, [rows.shape[1] if turned is None else turned], axis=1)
        pairs = first.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(first.shape)
        return np.concatenate([pairs, kept], axis=1).reshape(x.shape)

    return _Change(apply)


def _by_group(groups: int, heads: int, first: int = 0, *, columns: int = 0) -> _Change:
    """Heads of values group by group, after `first` rows.

    There the first heads of all groups lie first. With so many `columns` a head the heads are
    columns instead.
    """

    def apply(x: np.ndarray) -> np.ndarray:
        x = x.T if columns else x
        by_group = x[first:].reshape(heads // groups, groups, -1, *x.shape[1:]).swapaxes(0, 1)
        x = np.concatenate([x[:first], by_group.reshape(-1, *x.shape[1:])])
        return x.T if columns else x

    return _Change(apply, keeps_groups=columns % GROUP == 0)


def _interleaved(groups: int, keys: int, values: int) -> _Change:
    """Rows of q, k, v and z by group, as in Qwen3-Next; there they are one by one."""

    def apply(x: np.ndarray) -> np.ndarray:
        parts = np.split(x, np.cumsum([keys, keys, values]))
        of_group = [part.reshape(groups, -1, *x.shape[1:]) for part in parts]
        return np.concatenate(of_group, axis=1).reshape(x.shape)

    return _Change(apply)


class _Layout(NamedTuple):
    """Names and changes of tensors, by llama.cpp's names."""

    layer: str  # what names in layer {} begin with
    outside: dict[str, str]  # of layers
    inside: dict[str, str]  # several joined by "+" are one here, rows behind rows
    changes: Mapping[str, tuple[_Change, ...]] = MappingProxyType({})  # undone in this order
    head: Mapping[str, str] = MappingProxyType({})  # that predicts further tokens
    sizes: Mapping[str, int] = MappingProxyType({})  # of changes, by the config's fields


def _check_sizes(layout: _Layout, facts: _Facts, path: Path, values: Values) -> None:
    """Refuses a config with other sizes: weights would be other ones, of fitting shapes."""
    for table in (values, *map(values.get, ("dflash_config", *text_tables()))):
        for field, size in layout.sizes.items():
            if isinstance(table, Mapping) and table.get(field) not in (None, size):
                raise ValueError(
                    f"{path} says {field} = {shown(table[field])}, and {facts.file} {size}: get the"
                    " config.json that belongs to it"
                )


def _renamed(layout: _Layout, facts: _Facts) -> dict[str, Tensor]:
    """The tensors by transformers' names."""
    wanted = [("", gguf_name, name) for gguf_name, name in layout.outside.items()]
    for i in range(facts.num_layers + facts.num_heads):
        is_head = i >= facts.num_layers
        begin = "mtp.layers.0" if is_head else layout.layer.format(i)
        inside = {gguf_name: f"{begin}.{name}" for gguf_name, name in layout.inside.items()}
        inside |= layout.head if is_head else {}
        wanted += [(f"blk.{i}.", gguf_name, name) for gguf_name, name in inside.items()]
    left = {*facts.tensors} - {"rope_freqs.weight"}  # whose numbers config.json has
    tensors: dict[str, Tensor] = {}
    for begin, gguf_name, name in wanted:
        sources = [begin + part for part in gguf_name.split("+")]
        if left.issuperset(sources):
            if name in tensors:
                raise ValueError(
                    f"{facts.file} has {name} twice, also as {shown(begin + gguf_name)}"
                )
            left -= {*sources}
            changes = (*layout.changes.get(gguf_name, ()), *_CHANGES.get(gguf_name, ()))
            parts = [facts.tensors[source] for source in sources]
            tensors[name] = _changed(f"{facts.file}: {name}", parts, changes)
    if left:
        raise ValueError(f"{facts.file} has unknown tensors: {sorted(left)[:3]!s:.200}")
    return tensors


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

    def whole(arrays: Sequence[np.ndarray]) -> np.ndarray:
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)
        for change in changes:
            array = change.apply(array)
        return array

    def read() -> np.ndarray:
        return whole([part.read().astype(dtype, copy=False) for part in parts])

    readers = [part.four_bits for part in parts if part.four_bits is not None]

    def four_bits() -> tuple[np.ndarray, np.ndarray]:
        values, scales = zip(*(reader() for reader in readers), strict=True)
        return whole(values), whole(scales)

    fits = len(readers) == len(parts) and all(change.keeps_groups for change in changes)
    bits = min(part.bits for part in parts)
    return Tensor(shape, dtype, read, four_bits=four_bits if fits else None, bits=bits)


def _table(names: str, within: str = "") -> dict[str, str]:
    """A table "there here" of names, of matrices and biases; "a+b" become one."""
    begin = f"{within}." if within else ""
    return {
        "+".join(f"{name}.{part}" for name in there.split("+")): f"{begin}{here}.{part}"
        for there, here in (line.split() for line in names.split(","))
        for part in ("weight", "bias")
    }


def _mixer(within: str) -> dict[str, str]:
    """Names of the state space mixers."""
    names = "ssm_in in_proj, ssm_conv1d conv1d, ssm_norm norm, ssm_out out_proj"
    scalars = {"ssm_dt.bias": "dt_bias", "ssm_a": "A_log", "ssm_d": "D"}
    return _table(names, within) | {
        gguf_name: f"{within}.{name}" for gguf_name, name in scalars.items()
    }


def _attention(within: str) -> dict[str, str]:
    names = (
        "attn_q q_proj, attn_k k_proj, attn_v v_proj, attn_output o_proj,"
        " attn_q_norm q_norm, attn_k_norm k_norm"
    )
    return _table(names, within)


_MLP = "ffn_gate gate_proj, ffn_up up_proj, ffn_down down_proj"


def _outside(embedding: str, norm: str) -> dict[str, str]:
    return _table(f"token_embd {embedding}, output_norm {norm}, output lm_head")


def _unpaired(facts: _Facts) -> dict[str, Any]:
    """Undoes the order of queries and keys, which these have with RoPE or without."""
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


def _mamba2(facts: _Facts, values: Values) -> _Layout:
    inside = _table("attn_norm norm") | _mixer("mixer")
    return _Layout("backbone.layers.{}", _outside("backbone.embeddings", "backbone.norm_f"), inside)


def _granite(facts: _Facts, values: Values) -> _Layout:
    inside = _mixer("mamba") | _attention("self_attn")
    if values.get("model_type") == "bamba":
        norms, final = "attn_norm input_layernorm, ffn_norm pre_ff_layernorm", "final_layernorm"
        inside |= _table(_MLP, "feed_forward")
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


def _falcon_h1(facts: _Facts, values: Values) -> _Layout:
    inside = (
        _mixer("mamba")
        | _attention("self_attn")
        | _table(_MLP, "feed_forward")
        | _table("attn_norm input_layernorm, ffn_norm pre_ff_layernorm")
        | {"ffn_norm": "pre_ff_layernorm.weight"}
    )
    # Biases are multiplied there too, which those of transformers are not: refused as unknown.
    kept = ("ssm_conv1d.bias", "ssm_dt.bias")
    inside = {
        gguf_name: name
        for gguf_name, name in inside.items()
        if gguf_name[-5:] != ".bias" or gguf_name in kept
    }
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
    """Divides the weights by the multipliers of config.json; one of 0 stays in them.

    Tensors are read after the config, which is checked by then.
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
    return {
        f"{name}.weight": tuple(change._replace(keeps_groups=False) for change in both)
        for name, both in changes.items()
    }


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
    head |= {gguf_name: f"mtp.layers.1.{name}" for gguf_name, name in after.items()}
    outside = _outside("backbone.embeddings", "backbone.norm_f")
    return _Layout("backbone.layers.{}", outside, inside, head=head, **_unpaired(facts))


def _qwen(facts: _Facts, values: Values) -> _Layout:
    groups, heads = facts.size("ssm.group_count"), facts.size("ssm.time_step_rank")
    key_size, inner = facts.size("ssm.state_size"), facts.size("ssm.inner_size")
    keys = groups * key_size
    sizes = {
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": inner // heads,
    }
    norms = "attn_norm input_layernorm, post_attention_norm post_attention_layernorm"
    mlp = (
        f"{_MLP}, ffn_gate_inp gate,"
        " ffn_gate_inp_shexp shared_expert_gate, ffn_gate_shexp shared_expert.gate_proj,"
        " ffn_up_shexp shared_expert.up_proj, ffn_down_shexp shared_expert.down_proj"
    )
    inside = (
        _table(norms)
        | _attention("self_attn")
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
        changes["ssm_out.weight"] = (_by_group(groups, heads, columns=inner // heads),)
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


def _dflash(facts: _Facts, values: Values) -> _Layout:
    """A head (llama.cpp #27342), whose queries, keys and norms are as transformers has them."""
    outside = (
        "fc fc, enc.output_norm hidden_norm, output_norm norm,"
        " selector_hidden candidate_selector.hidden_projection"
    )
    names = (
        "attn_norm input_layernorm, ffn_norm post_attention_layernorm,"
        " attn_conv_proj attention_conv.kernel_projection, ffn_conv_proj mlp_conv.kernel_projection"
    )
    inside = _table(names) | _attention("self_attn") | _table(_MLP, "mlp")
    inside |= {"attn_conv_base": "attention_conv.base_kernel"}
    inside["ffn_conv_base"] = "mlp_conv.base_kernel"
    tables = {
        f"selector_{name}.weight": f"candidate_selector.{name}_codebook"
        for name in ("predecessor", "successor")
    }
    sizes = {"num_hidden_layers": facts.num_layers, "block_size": facts.size("block_size")}
    return _Layout("layers.{}", _table(outside) | tables, inside, sizes=sizes)


_LAYOUTS: dict[str, Callable[[_Facts, Values], _Layout]] = {
    "mamba2": _mamba2,
    "granitehybrid": _granite,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "qwen3next": _qwen,
    "qwen35": _qwen,
    "qwen35moe": _qwen,
    "dflash": _dflash,
}
