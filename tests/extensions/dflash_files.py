"""DFlash, DFlash 2 and DSpark heads in files, with random weights."""

import json

import numpy as np

from tests.convert import checkpoints
from tests.extensions.eagle3_files import SIZES, VOCAB, WIDTH, layer_shapes

RANK = 6
CONFIG = SIZES | json.loads("""{
  "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
  "rope_scaling": null, "num_target_layers": 4, "block_size": 9, "sliding_window": null,
  "dflash_config": {"mask_token_id": 36, "target_layer_ids": [0, 2]},
  "layer_types": ["full_attention", "full_attention"]
}""")
# One with all that DSpark has, whose first layer has a window.
DSPARK = json.loads("""{
  "architectures": ["Qwen3DSparkModel"], "dflash_config": "absent", "block_size": 8,
  "mask_token_id": 3, "target_layer_ids": [1], "layer_types": ["sliding_attention",
  "full_attention"], "sliding_window": 6, "markov_rank": 6, "markov_head_type": "vanilla",
  "enable_confidence_head": true, "confidence_head_with_markov": true, "num_anchors": 512
}""")
# One of DFlash 2, whose block sees itself, and whose windows are shorter than the texts.
SECOND = json.loads("""{
  "architectures": ["DFlash2DraftModel"], "is_causal": false, "block_size": "absent",
  "dflash_config": {"mask_token_id": 36, "target_layer_ids": [0, 2], "block_size": 6,
  "conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
  "layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 7
}""")


# Published heads for Qwen3.8-27B, as their readers quote them; no file was opened.
Z_LAB = json.loads("""{
  "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": false,
  "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "rms_norm_eps": 1e-06,
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 248320,
  "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
  "sliding_attention", "sliding_attention"], "sliding_window": 2048, "num_target_layers": 64,
  "dflash_config": {"block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16,
  "selector_rank": 256, "selector_top_k": 16, "mask_token_id": 248070,
  "target_layer_ids": [5, 19, 33, 47, 61]}
}""")
RED_HAT = json.loads("""{
  "architectures": ["DSparkDraftModel"], "aux_hidden_state_layer_ids": [4, 12, 20, 28, 36, 44, 52,
  60], "block_size": 8, "confidence_head_with_markov": true, "draft_vocab_size": 248320,
  "enable_confidence_head": true, "markov_head_type": "vanilla", "markov_rank": 256,
  "mask_token_id": 248077, "sample_from_anchor": true, "sliding_window_non_causal": false,
  "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "Qwen/Qwen3.8-27B"}},
  "speculators_model_type": "dspark", "speculators_version": "0.7.0", "target_hidden_size": null,
  "transformer_layer_config": {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size":
  17408, "num_hidden_layers": 5, "rms_norm_eps": 1e-06, "num_attention_heads": 20,
  "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "layer_types":
  ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
  "sliding_attention"], "sliding_window": 2048, "use_sliding_window": true, "rope_parameters":
  {"mrope_section": [44, 44, 40], "partial_rotary_factor": 1.0, "rope_theta": 10000000,
  "rope_type": "default"}}
}""")
# The second one, tiny: what it says of layers is in a table.
SPECULATORS = dict.fromkeys((*CONFIG, "target_layer_ids", "num_anchors"), "absent") | RED_HAT
SPECULATORS |= json.loads("""{
  "aux_hidden_state_layer_ids": [1], "draft_vocab_size": 37, "mask_token_id": 3, "markov_rank": 6
}""")
SPECULATORS["transformer_layer_config"] = (
    RED_HAT["transformer_layer_config"]
    | SIZES
    | json.loads("""{
      "rope_parameters": {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0},
      "layer_types": ["sliding_attention", "sliding_attention"], "num_hidden_layers": 2,
      "sliding_window": 9, "vocab_size": 37
    }""")
)


def files(dspark=False, vocab=VOCAB, **changes):
    """A config and the tensors of a head."""
    config = CONFIG | {"vocab_size": vocab} | (DSPARK if dspark else {}) | changes
    config = {name: value for name, value in config.items() if value != "absent"}
    number = len((config.get("dflash_config") or config).get("target_layer_ids", [1]))
    shapes = {"fc": (WIDTH, number * WIDTH), "hidden_norm": (WIDTH,), "norm": (WIDTH,)}
    layer = layer_shapes() | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (8,))
    for at in range(2):
        shapes |= {f"layers.{at}.{name}": shape for name, shape in layer.items()}
    if dspark:
        shapes |= dict.fromkeys(("embed_tokens", "lm_head"), (vocab, WIDTH))
        shapes |= {f"markov_head.markov_w{i}": (vocab, RANK) for i in (1, 2)}
        shapes["confidence_head.proj"] = (1, WIDTH + RANK * config["confidence_head_with_markov"])
    second = config["architectures"] == ["DFlash2DraftModel"]
    if second:
        convs = [f"layers.{at}.{name}_conv" for at in range(2) for name in ("attention", "mlp")]
        shapes |= {f"{name}.kernel_projection": (2 * 3 * WIDTH // 4, WIDTH) for name in convs}
        shapes["candidate_selector.hidden_projection"] = (RANK, WIDTH)
    shapes = {f"{name}.weight": shapes[name] for name in shapes}
    if second:
        shapes |= {f"{name}.base_kernel": (2, 3, WIDTH) for name in convs}
        codebooks = ("predecessor_codebook", "successor_codebook")
        shapes |= {f"candidate_selector.{name}": (vocab, RANK) for name in codebooks}
    tensors = checkpoints.random_weights(shapes, np.random.default_rng(0))
    if dspark:
        tensors["confidence_head.proj.weight"] *= 4  # so that places differ
        tensors["confidence_head.proj.bias"] = np.array([0.3], np.float32)
    return config, tensors


def saved(path, dspark=False, replaced=(), **options):
    """Writes a head, with some tensors changed."""
    config, tensors = files(dspark, **options)
    return checkpoints.write_safetensors(path, config, tensors | dict(replaced))


# Names in llama.cpp's files (#27342), as their readers list them.
_NAMES = """
fc.weight fc.weight, hidden_norm.weight enc.output_norm.weight, norm.weight output_norm.weight,
candidate_selector.hidden_projection.weight selector_hidden.weight,
candidate_selector.predecessor_codebook selector_predecessor.weight,
candidate_selector.successor_codebook selector_successor.weight,
input_layernorm.weight attn_norm.weight, post_attention_layernorm.weight ffn_norm.weight,
self_attn.q_proj.weight attn_q.weight, self_attn.k_proj.weight attn_k.weight,
self_attn.v_proj.weight attn_v.weight, self_attn.o_proj.weight attn_output.weight,
self_attn.q_norm.weight attn_q_norm.weight, self_attn.k_norm.weight attn_k_norm.weight,
mlp.gate_proj.weight ffn_gate.weight, mlp.up_proj.weight ffn_up.weight,
mlp.down_proj.weight ffn_down.weight, attention_conv.base_kernel attn_conv_base,
attention_conv.kernel_projection.weight attn_conv_proj.weight,
mlp_conv.base_kernel ffn_conv_base, mlp_conv.kernel_projection.weight ffn_conv_proj.weight
"""
GGUF = dict(pair.split() for pair in _NAMES.split(","))
