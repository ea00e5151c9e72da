"""Checkpoints of a tiny Qwen3.5 with its multi-token prediction head, with random weights."""

import dataclasses
import functools

import numpy as np

import stree_jax as st
from stree_jax.testing import HYBRIDS
from tests.convert import checkpoints, configs
from tests.extensions.mtp_files import target_files, written
from tests.numpy_parts import attention_shapes

KEYS = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
EXPERTS = st.MoeConfig(4, 2, 6, shared_size=5, shared_gate=True)


def model_config(experts=False):
    """A delta layer and a layer of attention, with MLPs or experts."""
    config = HYBRIDS["qwen3_5"]
    kinds = ("gated_delta", "moe", "attention", "moe")
    return config.with_layers(kinds, moe=EXPERTS) if experts else config


def config_27b():
    """Qwen3.8-27B, tiny: three delta layers to one of attention, and its ratios of heads."""
    config = HYBRIDS["qwen3_5"]
    delta = dataclasses.replace(config.gated_delta, num_heads=6, num_groups=2)
    attention = dataclasses.replace(config.attention, num_heads=6, num_kv_heads=1)
    kinds = ("gated_delta", "mlp") * 3 + ("attention", "mlp")
    return config.with_layers(kinds, gated_delta=delta, attention=attention)


def shapes(config):
    """The tensors of a head; experts are merged, as in Qwen3.5's releases."""
    width, size = config["hidden_size"], config["head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    layer = {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
    attention = attention_shapes(width, queries, keys)
    attention |= {"q_proj.weight": (2 * queries, width)}  # queries and gates
    attention |= {f"{name}_norm.weight": (size,) for name in "qk"}
    layer |= {f"self_attn.{name}": shape for name, shape in attention.items()}
    if "num_experts" in config:
        count, hidden = config["num_experts"], config["moe_intermediate_size"]
        layer |= {
            "mlp.gate.weight": (count, width),
            "mlp.experts.gate_up_proj": (count, 2 * hidden, width),
            "mlp.experts.down_proj": (count, width, hidden),
            "mlp.shared_expert_gate.weight": (1, width),
        }
        layer |= mlp_shapes("mlp.shared_expert", width, config["shared_expert_intermediate_size"])
    else:
        layer |= mlp_shapes("mlp", width, config["intermediate_size"])
    return {f"mtp.layers.0.{name}": shape for name, shape in layer.items()} | {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
        "mtp.norm.weight": (width,),
    }


def mlp_shapes(name, width, hidden):
    names = dict.fromkeys(("gate", "up"), (hidden, width)) | {"down": (width, hidden)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in names.items()}


@functools.cache
def files(experts=False, config=None):
    """Config and tensors of the target, and tensors of its head."""
    to = "qwen3_5_moe_text" if experts else "qwen3_5_text"
    values, tensors = target_files(config or model_config(experts), to)
    head = checkpoints.random_weights(shapes(values), np.random.default_rng(1))
    head |= {name: head[name] - 1 for name in head if "norm" in name}  # norms multiply by 1 + w
    return values, tensors, head


def saved(path, changes=(), tensors=None, experts=False):
    """Writes the checkpoint, with some fields changed, and other tensors of the head."""
    return written(path, files(experts), KEYS | dict(changes), tensors)


def wrapped(path, changes=(), tensors=None, experts=False, config=None):
    """The same inside a multimodal checkpoint: the head is beside the text model.

    Its config has all fields of the published one.
    """
    values, target, head = files(experts, config)
    inside = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in target.items()
    }
    inside |= (head if tensors is None else tensors) | {
        "model.visual.merger.weight": target["lm_head.weight"]
    }
    outer = configs.QWEN3_5_35B if experts else configs.QWEN3_8_27B
    text = outer["text_config"] | values | KEYS | dict(changes)
    return checkpoints.write_safetensors(path, outer | {"text_config": text}, inside)
