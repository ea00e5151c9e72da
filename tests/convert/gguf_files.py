"""GGUF files as llama.cpp's converter makes them, from checkpoints of transformers.

Written from its source (`conversion/` there), apart from what reads such files. What it does for
each family: names by the package's own table, other numbers of some tensors, and the metadata.
"""

import json
import re

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
from stree_jax.convert.families import describe  # noqa: E402
from tests.convert import checkpoints, configs  # noqa: E402
from tests.extensions.mtp_files import target_files  # noqa: E402

F32 = gguf.GGMLQuantizationType.F32
ARCHITECTURES = {
    "mamba2": "MAMBA2",
    "bamba": "GRANITE_HYBRID",
    "granitemoehybrid": "GRANITE_HYBRID",
    "falcon_h1": "FALCON_H1",
    "nemotron_h": "NEMOTRON_H",
    "qwen3_next": "QWEN3NEXT",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
}
# Names of heads within the layer that is theirs in a GGUF file.
HEAD = {
    "mtp.fc.weight": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm",
    "mtp.norm.weight": "nextn.shared_head_norm",
    "mtp.layers.0.eh_proj.weight": "nextn.eh_proj",
    "mtp.layers.0.enorm.weight": "nextn.enorm",
    "mtp.layers.0.hnorm.weight": "nextn.hnorm",
    "mtp.layers.1.norm.weight": "post_attention_norm",
    "mtp.layers.1.final_layernorm.weight": "nextn.shared_head_norm",
}


def original(path, model_type, **changes):
    """A checkpoint of transformers with random weights: its model, config and tensors."""
    values = {"model_type": model_type} | configs.TRANSFORMERS[model_type] | changes
    config = describe(path / "config.json", values, {}).config
    values, tensors = target_files(config, model_type)
    checkpoints.write_safetensors(path, values, tensors)
    return checkpoints.random_model(config), values, tensors


def permute(rows, heads):
    """llama.cpp's order of queries and keys: the two that RoPE turns together are neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tiled(x, axis, groups, heads):
    """Value heads in the order of ggml's broadcast: first the first of each group of heads."""
    size = x.shape[axis] // heads
    order = np.arange(heads).reshape(groups, heads // groups).T.ravel()
    return np.take(x, (order[:, None] * size + np.arange(size)).ravel(), axis)


def merged_experts(tensors):
    """Experts of Qwen and Nemotron, one by one in files: stacked, a tensor for each projection."""
    found = {}
    for name in sorted(tensors, key=lambda name: [int(x) for x in re.findall(r"\d+", name)]):
        stack = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        found.setdefault(stack, []).append(tensors[name])
    return {
        name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in found.items()
    }


def count_layers(values):
    """Layers without those of a head."""
    return values.get("num_hidden_layers") or len(values["layers_block_type"])


def converted(values, tensors):
    """Tensors under the names of llama.cpp's table, with its numbers."""
    kind = values["model_type"]
    qwen, last, first = kind.startswith("qwen"), count_layers(values), {}
    heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    for name, x in merged_experts(tensors).items():
        x = x.astype(np.float32)
        if name in HEAD:  # first of all: so the names of its norms end as those of others do
            name = f"blk.{last}.{HEAD[name]}.weight"
        begin = f"{'model' if qwen else 'backbone'}.layers.{last}"
        name = re.sub(r"^mtp\.layers\.[01]", begin, name)
        if qwen:
            groups, many = values["linear_num_key_heads"], values["linear_num_value_heads"]
            keys = groups * values["linear_key_head_dim"]
            inner = many * values["linear_value_head_dim"]
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                x = x + 1
            if name.endswith("in_proj_qkvz.weight"):
                sizes = [keys // groups] * 2 + [inner // groups] * 2
                by_group = x.reshape(groups, -1, x.shape[1])
                ends = np.cumsum(sizes)[:-1]
                q, k, v, z = (part.reshape(-1, x.shape[1]) for part in np.split(by_group, ends, 1))
                begin = name.removesuffix("qkvz.weight")
                first |= {f"{begin}qkv.weight": np.concatenate([q, k, v]), f"{begin}z.weight": z}
                continue
            if kind != "qwen3_next" and "linear_attn" in name:
                if "in_proj_qkv" in name or "conv1d" in name:
                    x = np.concatenate([x[: 2 * keys], tiled(x[2 * keys :], 0, groups, many)])
                elif "out_proj" in name:
                    x = tiled(x, 1, groups, many)
                elif "linear_attn.norm" not in name:
                    x = tiled(x, 0, groups, many)
        elif kind != "falcon_h1" and re.search(r"[qk]_proj\.(weight|bias)$", name):
            x = permute(x, heads["k_proj" in name])
        if kind == "falcon_h1":
            x = multiplied(name, x, values)
        if name.endswith("A_log"):
            x = -np.exp(x) if qwen else -np.exp(x)[:, None]
        elif name.endswith(".D"):
            x = x[:, None]
        elif "conv1d.weight" in name:
            x = x[:, 0]
        elif not qwen and re.search(r"(mamba|mixer)\.norm\.weight$", name):
            x = x.reshape(values.get("mamba_n_groups", values.get("n_groups")), -1)
        elif name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        elif name.endswith("e_score_correction_bias"):
            name = name.replace("_bias", ".bias")
        elif name.endswith("input_linear.weight"):
            gate, up = np.split(x, 2, axis=-2)
            experts = bool(values["num_local_experts"])
            into = {"shared_mlp": "ffn_{}_shexp" if experts else "ffn_{}"}
            into = into.get(name.split(".")[-3], "ffn_{}_exps")
            layer = name.split(".")[2]
            for part, own in (("gate", gate), ("up", up)):
                first[f"blk.{layer}.{into.format(part)}.weight"] = own
            continue
        elif name.endswith("shared_mlp.output_linear.weight") and not values["num_local_experts"]:
            first[f"blk.{name.split('.')[2]}.ffn_down.weight"] = x
            continue
        if "mixer.experts." in name:
            name = name.replace("backbone", "model").replace("mixer", "mlp")
        first[name] = x
    return first


def multiplied(name, x, values):
    """Falcon-H1's weights, with its multipliers in them."""
    into = values["attention_in_multiplier"]
    for part, by in (
        ("down_proj", values["mlp_multipliers"][1]),
        ("gate_proj", values["mlp_multipliers"][0]),
        ("k_proj", values["key_multiplier"] * into),
        ("q_proj", into),
        ("v_proj", into),
        ("o_proj", values["attention_out_multiplier"]),
        ("out_proj", values["ssm_out_multiplier"]),
        ("lm_head", values["lm_head_multiplier"]),
        ("embed_tokens", values["embedding_multiplier"]),
    ):
        if part in name:
            return x * np.float32(by)
    if "in_proj" in name:
        inner, of_bc = values["mamba_d_ssm"], values["mamba_n_groups"] * values["mamba_d_state"]
        sizes = [inner, inner, of_bc, of_bc, values["mamba_n_heads"]]
        by = np.repeat(values["ssm_multipliers"], sizes) * values["ssm_in_multiplier"]
        x = x * by[:, None].astype(np.float32)
    return x


def metadata(values):
    """What the converter says of sizes; methods of the writer and their arguments."""
    kind, num_layers, get = values["model_type"], count_layers(values), values.get
    heads = get("mtp_num_hidden_layers", get("num_nextn_predict_layers")) or 0
    facts = {
        "block_count": num_layers + heads,
        "nextn_predict_layers": heads or None,
        "embedding_length": values["hidden_size"],
        "head_count": get("num_attention_heads", 0),
    }
    if kind != "mamba2":
        types = get("layer_types", get("layers_block_type")) or []
        here = [i for i, each in enumerate(types) if each in ("full_attention", "attention")]
        here = get("attn_layer_indices", here)
        many = [get("num_key_value_heads") * (i in here) for i in range(num_layers)]
        many += [get("num_key_value_heads")] * heads
        listed = kind in ("bamba", "granitemoehybrid", "nemotron_h")
        facts["head_count_kv"] = many if listed else get("num_key_value_heads")
    if kind.startswith("qwen"):
        return facts | {
            "ssm_state_size": values["linear_key_head_dim"],
            "ssm_group_count": values["linear_num_key_heads"],
            "ssm_time_step_rank": values["linear_num_value_heads"],
            "ssm_inner_size": values["linear_num_value_heads"] * values["linear_value_head_dim"],
        }
    heads = get("mamba_n_heads", get("mamba_num_heads", get("num_heads")))
    return facts | {
        "ssm_state_size": get("mamba_d_state", get("ssm_state_size", get("state_size"))),
        "ssm_group_count": get("mamba_n_groups", get("n_groups")),
        "ssm_time_step_rank": heads,
        "ssm_inner_size": heads * get("mamba_d_head", get("mamba_head_dim", get("head_dim"))),
    }


def write(file, values, tensors, kind=F32, edit=dict, **changes):
    """Writes a checkpoint; other metadata may be None, and is left out."""
    name = ARCHITECTURES[values["model_type"]]
    if any(".experts." in each for each in tensors) and name == "NEMOTRON_H":
        name += "_MOE"
    architecture = gguf.MODEL_ARCH[name]
    table = gguf.get_tensor_name_map(architecture, 99)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    for fact, value in (metadata(values) | changes).items():
        if value is not None:
            getattr(writer, f"add_{fact}")(*(value if isinstance(value, tuple) else (value,)))
    for own, x in edit(converted(values, tensors)).items():
        name = own if own.startswith("blk.") else table.get_name(own, (".weight", ".bias"))
        assert name is not None, own
        add(writer, name, x, kind)
    finish(writer)
    file.with_name("config.json").write_text(json.dumps(values))
    return file


def add(writer, name, x, kind=F32):
    """Adds a tensor: as `kind` if it is a matrix of a product, or the embedding."""
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    plain = x.ndim < 2 or re.search(r"norm|conv1d|gate_inp|ssm_[ad]$", name) or x.shape[-1] % block
    kind = F32 if plain else kind
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(x), kind), raw_dtype=kind)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
