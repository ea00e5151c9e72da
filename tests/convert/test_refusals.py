"""Checkpoints that every reader refuses, and that `convert` leaves nothing of."""

import json
import struct

import numpy as np

from tests.convert import checkpoints, configs, numpy_mamba_in_llama
from tests.convert.checkpoints import CONFIG, MIXER, refused, rewritten, sharded, write_index
from tests.helpers import by_message

NESTED = json.loads("[" * 600 + "1" + "]" * 600)


def ssm(**changes):
    """Changes below ssm_cfg."""
    return {"ssm_cfg": CONFIG["ssm_cfg"] | changes}


LING = configs.TRANSFORMERS["bailing_hybrid"] | {"layer_types": None, "no_kda_lora": True}
LING |= {"num_hidden_layers": 2, "layer_group_size": 2, "routed_scaling_factor": 1.0}
# Changes to a config.json of mamba_ssm, and the message.
OF_MAMBA_SSM = [
    ({"attn_layer_idx": [1]}, "attn_cfg.causal is not true"),
    ({"attn_layer_idx": [2]}, "attn_layer_idx must be a list of layers below 2"),
    (
        {"attn_layer_idx": [1], "attn_cfg": {"causal": True, "num_heads": 2, "novel": 1}},
        r"unknown fields \['attn_cfg.novel'\]",
    ),
    (
        {"attn_layer_idx": [1]}
        | {"attn_cfg": {"causal": True, "num_heads": 2, "rotary_emb_interleaved": True}},
        "rotary_emb_interleaved = true is not supported",
    ),
    ({"rms_norm": False}, r"rms_norm = false \(LayerNorm\) is not supported"),
    ({"novel": 1}, r"unknown fields \['novel'\]; they might change"),
    (ssm(norm_before_gate="false"), "norm_before_gate must be true or false, got 'false'"),
    ({"d_model": "16"}, "d_model must be an integer, .*'16'"),
    ({"n_layer": 10**9}, "n_layer must be an integer, from 1 to 4096"),
    ({"n_layer": 4096}, r"config\.json says 4096 layers, but model\.safetensors has 21 tensors"),
    ({"d_model": None}, "d_model is null, which says nothing"),
]
# model_type, fields beside it, and the message.
OF_TRANSFORMERS = [
    ("mamba", {}, "'mamba': Mamba-1 layers"),
    ("qwen4_exp", {}, "'qwen4_exp': gated delta layers between hyper-connections"),
    *(
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}} | fields, says)
        for fields, says in (
            ({"rope_parameters": None}, "must have rope_theta: a number, or null for no RoPE"),
            ({}, "layer_types is missing"),
            ({"layer_types": ["sliding_attention"]}, "unknown kinds .*sliding"),
            ({"linear_num_key_heads": 5}, "num_groups = 5 does not divide"),
        )
    ),
    ("lara_mini", {"norm_topk_prob": False}, "norm_topk_prob = false is not supported"),
    ("glm5_next", {}, "'glm5_next': streams between its layers"),
    *(
        ("kimi_linear", {"num_hidden_layers": 2} | fields, says)
        for fields, says in (
            ({"mla_use_output_gate": True}, "'mla_use_output_gate'. are of Kimi K3's text"),
            ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "'gate_lower_bound'. are of Kimi"),
            ({"linear_attn_config": {"kda_layers": [0, 1]}}, "each layer once, from 1 on"),
            ({"mla_use_nope": False}, "mla_use_nope = False is not supported, only True"),
            ({"attention_bias": True}, "attention_bias = True is not supported"),
            ({}, "layer_types is missing"),
        )
    ),
    *(
        ("bailing_hybrid", fields, says)
        for fields, says in (
            ({}, r"fields \[\] of KDA: .* Ling 2.5 and 2.6 have lightning attention"),
            (LING | {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "Ling 2.5 and 2.6 have"),
            (LING | {"num_hidden_layers": 3}, "layer_group_size = 2 does not divide .* = 3, and"),
            (LING | {"rope_interleave": False}, "rope_interleave = False is not supported"),
            (LING | {"expert_swiglu_limit_list": [1]}, "must have a number or null for each"),
            (LING | {"expert_swiglu_limit_list": [4, 7]}, "layer 0 has {'limit': 4.0} and no"),
        )
    ),
    ("qwen3_5", {}, "needs a table text_config"),
    (
        "qwen3_5_moe",
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        "says text_config.quantization_config: the scheme 'awq' .* use the bfloat16 original",
    ),
    *(
        ("qwen3_5", {"text_config": {name: value}}, f"{name} {says}")
        for name, value, says in (
            ("layer_scale", True, "= true is not supported"),
            ("attn_output_gate", False, "= false is not supported"),
            ("output_gate_type", "sigmoid", "is 'sigmoid', not one of"),
        )
    ),
    ("qwen3_5_moe", {"text_config": {"mlp_only_layers": [1]}}, "mlp_only_layers = .1,. with exp"),
    ("lfm2", {}, "full_attn_idxs is missing"),
    *(
        ("lfm2", {"full_attn_idxs": [1]} | fields, says)
        for fields, says in (
            ({"layer_types": ["conv"]}, "layer_types has 1 entries for num_hidden_layers = 32"),
            ({"block_dim": 64}, "block_dim = 64, elsewhere 2560"),
            ({"use_pos_enc": False}, "use_pos_enc = false is not supported"),
            ({"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier must be a number above"),
            ({"block_ffn_dim_multiplier": 1e290}, r"hidden_size must be below 2\*\*31"),
        )
    ),
    ("lfm2_moe", {"layer_types": ["conv"], "use_expert_bias": False}, "use_expert_bias = false is"),
    *(
        ("lfm3", fields, says)
        for fields, says in (
            ({"attention_bias": True}, "attention_bias = true with use_attention_gate = true is"),
            ({"rope_parameters": {}}, "rope_parameters.*_attention.rope_theta is missing"),
            ({"layer_types": ["conv"]}, "layer_types has 1 entries for num_hidden_layers = 24"),
        )
    ),
    ("llama", {}, "of no known family \\(model_type = 'llama'\\)"),
    ("nemo_speechlm", {}, "a speech model; its text model alone has no use"),
    ("nemotron_h_omni", {}, "needs a table text_config or llm_config"),
    ("nemotron_h_omni", {"text_config": {"model_type": "mamba"}}, "'mamba': Mamba-1 layers"),
    (
        "bamba",
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor is not 0.5",
    ),
    ("bamba", {"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'"),
    (
        "bamba",
        {"attn_layer_indices": [1], "layer_types": ["mamba"] * 32},
        r"layer_types and attn_layer_indices = \(1,\) are two names of one thing",
    ),
    ("bamba", {"mamba_n_heads": 3}, "mamba_n_heads = 3 does not divide 8192"),
    ("falcon_h1", {"mlp_multipliers": [1]}, "mlp_multipliers must be 2 numbers"),
    ("falcon_h1", {"hidden_act": "relu"}, "hidden_act is 'relu', not one of"),
    ("granitemoehybrid", {"num_experts_per_tok": 9}, "num_active = 9 is more than the 8 experts"),
    ("zamba2", {"use_long_context": True}, "use_long_context = true is not"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("mamba2", {"hidden_size": 100}, "is not num_heads \\* head_dim"),
]
# Fields of a mamba2 whose sizes fit, and the message.
OF_MAMBA2 = [
    ({"time_step_limit": [0.0, {"__float__": ["x"]}]}, "time_step_limit must be two"),
    ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a number above 0"),
    ({"use_bias": "x" * 10_000}, "use_bias must be true or false, got 'xxx"),
    ({"novel": NESTED}, r"config\.json is damaged: it is nested more than 32 deep"),
]
# Whole files, and the message.
OTHERS = [
    ({"ssm_cfg": {}}, "ssm_cfg.layer is 'Mamba1' \\(the default\\); only Mamba-2"),
    ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg.layer is 'Mamba1'; only Mamba-2"),
    ({"d_model": 8, "n_layer": 2}, "has no ssm_cfg: a Mamba-1 model"),
    ({"dim": 64, "n_layers": 1, "vocab_size": 9, "n_heads": 8}, "of no known family"),
    ([1], "it is not a JSON object"),
    ("", r"config\.json is damaged: it is empty"),
    *((text, r"config\.json is damaged") for text in ("{", "[" * 100_000, "\x00", '{"a": }')),
]
MAMBA2 = {"hidden_size": 16, "num_heads": 4, "head_dim": 8}
CONFIGS = [
    *((CONFIG | changes, message) for changes, message in OF_MAMBA_SSM),
    *(({"model_type": name} | fields, message) for name, fields, message in OF_TRANSFORMERS),
    *(({"model_type": "mamba2"} | MAMBA2 | fields, message) for fields, message in OF_MAMBA2),
    *OTHERS,
]


def in_config(content):
    """A damage: other fields, or another text."""

    def damage(checkpoint):
        text = content if isinstance(content, str) else json.dumps(content)
        (checkpoint / "config.json").write_text(text)

    return damage


def in_mamba_in_llama(config, mamba_config):
    """Other fields in the two configs of MambaInLlama."""

    def damage(checkpoint):
        both = configs.mamba_in_llama_configs()
        checkpoints.described_checkpoint(checkpoint, numpy_mamba_in_llama, *both)
        names = ("config.json", "mamba_config.json")
        for name, values, changes in zip(names, both, (config, mamba_config), strict=True):
            (checkpoint / name).write_text(json.dumps(values | changes))

    return damage


MAMBA_IN_LLAMA = [
    ({}, {"d_inner": 24}, r"mamba_config\.json: d_inner = 24 is not ssm_cfg\.ngroups"),
    ({}, {"n_layer": 9}, r"n_layer is not config\.json's num_hidden_layers"),
    ({}, {"hidden_act": "gelu"}, r"mamba_config\.json: hidden_act is 'gelu', not one of"),
    ({"rope_scaling": {"rope_type": "yarn"}}, {}, "rope_type is 'yarn'"),
]


def in_weights(**changes):
    return lambda checkpoint: rewritten(checkpoint, **changes)


WEIGHTS_REFUSED = [
    ({f"{MIXER}.D": None}, rf"{MIXER}\.D \(4,\) is missing"),
    ({"extra.weight": np.ones((2, 3), np.float32)}, r"extra\.weight\W \(2, 3\) is not expected"),
    ({f"{MIXER}.D": np.ones(5, np.float32)}, r"D has shape \(5,\), the config says \(4,\)"),
]


def in_file(header):
    """A safetensors file of this header and four bytes."""
    encoded = json.dumps(header).encode()
    data = struct.pack("<Q", len(encoded)) + encoded + bytes(4 * bool(header))
    return lambda checkpoint: (checkpoint / "model.safetensors").write_bytes(data)


FLOAT8 = {"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
SCALES = {"x": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}


def in_index(change):
    """Two shards, and an index that does not fit them; `change` takes its weight map."""

    def damage(checkpoint):
        weight_map = sharded(checkpoint)
        write_index(checkpoint, change(weight_map, next(iter(weight_map))))

    return damage


OUTSIDE = ("../part-0.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", "", ".", 3)
INDICES = [
    (lambda files, first: {}, "has no weight_map"),
    (lambda files, first: files | {"ghost": files[first]}, "1 tensors are not in their files"),
    (lambda files, first: files | {first: "part-9.safetensors"}, "'part-9.safe.*does not exist"),
    (lambda files, first: {k: files[k] for k in {*files} - {first}}, "1 tensors are in files it d"),
    *(
        (lambda files, _, name=name: files | {"x": name}, "not a plain file name|does not exist")
        for name in (*OUTSIDE, "x" * 5000, "a\0b")
    ),
]

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 9\n"
LFS = "git lfs pull.*{} is a pointer of Git LFS"


def other(name, content=None, link=None):
    """Another content, a link, or a directory in the place of a file."""

    def damage(checkpoint):
        file = checkpoint / name
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        elif link is not None:
            file.symlink_to(link)
        else:
            file.mkdir()

    return damage


def without(*names):
    return lambda checkpoint: [(checkpoint / name).unlink() for name in names]


BOTH = ("config.json", "model.safetensors")
IN_THEIR_PLACE = [
    *(
        (other(name, POINTER), LFS.format(name))
        for name in (*BOTH, "mamba_config.json", "model.safetensors.index.json")
    ),
    (other("model.safetensors", b"\n<!DOCTYPE html><title>"), "is a web page: download the file"),
    (other("config.json", link="config.json"), "a link to 'config.json', cannot be read: Too many"),
    (other("model.safetensors", link="../gone"), "a link to '../gone', cannot be read: No such"),
    *((other(name), f"{name} is a directory; a file is expected") for name in BOTH),
    (other("adapter_config.json", b"{}"), "has an adapter .PEFT.: load its model with adapter="),
    (without("config.json"), "is not a checkpoint: it has no config.json or params.json"),
    (without("model.safetensors"), "has no weights: none of model.safetensors, pytorch_model.bin"),
]

REFUSED = [
    *IN_THEIR_PLACE,
    *((in_config(config), message) for config, message in CONFIGS),
    *((in_mamba_in_llama(*both), message) for *both, message in MAMBA_IN_LLAMA),
    *((in_weights(**changes), message) for changes, message in WEIGHTS_REFUSED),
    (in_file({}), r"model\.safetensors has no tensors"),
    (in_file(FLOAT8), "'x' is quantised, and no file says how: get the config.json that belongs"),
    (in_file(SCALES), "stored as F8_E8M0, which is not read; use the bfloat16 original"),
    *((in_index(change), message) for change, message in INDICES),
    (
        lambda checkpoint: write_index(checkpoint, {"x": "part-0.safetensors"}),
        "has both model.safetensors and model.safetensors.index.json",
    ),
]


@by_message(("damage", "message"), REFUSED)
def test_refused(checkpoint, damage, message):
    damage(checkpoint)
    refused(checkpoint, message)
