"""Configs: as published, with all their fields, and tiny ones."""

import json

# Fields of every transformers config.
COMMON = json.loads("""{
  "architectures": ["X"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
  "initializer_range": 0.02, "pad_token_id": 0, "torch_dtype": "bfloat16", "transformers_version":
  "4.57.0", "use_cache": true
}""")
BAMBA_9B = COMMON | json.loads("""{
  "model_type": "bamba", "attention_bias": false, "attn_layer_indices": [9, 18, 27],
  "attn_rotary_emb": 64, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
  "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64,
  "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
  "mamba_proj_bias": false, "max_position_embeddings": 4096, "mlp_bias": false,
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "num_logits_to_keep": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling":
  null, "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 128256,
  "z_loss_coefficient": 0.0001
}""")
FALCON_H1_500M = COMMON | json.loads("""{
  "model_type": "falcon_h1", "attention_bias": false, "attention_in_multiplier": 1.0,
  "attention_out_multiplier": 0.9375, "attn_layer_indices": null, "embedding_multiplier":
  5.656854249492381, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024,
  "intermediate_size": 2048, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625,
  "mamba_chunk_size": 128, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64,
  "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
  "mamba_n_heads": 24, "mamba_norm_before_gate": false, "mamba_proj_bias": false,
  "mamba_rms_norm": false, "mamba_use_mlp": true, "max_position_embeddings": 16384, "mlp_bias":
  false, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375],
  "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2,
  "num_logits_to_keep": 1, "projectors_bias": false, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3535533905932738,
  0.25, 0.3535533905932738, 0.5, 0.3535533905932738], "ssm_out_multiplier": 0.23570226039551587,
  "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min":
  0.001, "time_step_rank": "auto", "vocab_size": 32784
}""")
GRANITE_350M = COMMON | json.loads("""{
  "model_type": "granitemoehybrid", "attention_bias": false, "attention_multiplier": 0.015625,
  "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 768, "init_method": "mup",
  "intermediate_size": 2048, "logits_scaling": 3, "mamba_chunk_size": 256, "mamba_conv_bias":
  true, "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_expand": 2,
  "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": false, "max_position_embeddings":
  32768, "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 0,
  "num_hidden_layers": 32, "num_key_value_heads": 4, "num_local_experts": 0,
  "output_router_logits": false, "position_embedding_type": "nope", "residual_multiplier": 0.246,
  "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000, "router_aux_loss_coef": 0.0,
  "shared_intermediate_size": 2048, "tie_word_embeddings": true, "vocab_size": 100352
}""")
GRANITE_350M["layer_types"] = ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)]
_NEMOTRON = COMMON | json.loads("""{
  "model_type": "nemotron_h", "attention_bias": false, "auto_map": {"AutoConfig":
  "configuration_nemotron_h.NemotronHConfig"}, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
  "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-05, "mamba_hidden_act": "silu",
  "mamba_proj_bias": false, "mlp_bias": false, "mlp_hidden_act": "relu2", "n_groups": 8,
  "num_logits_to_keep": 1, "rescale_prenorm_residual": true, "residual_in_fp32": false,
  "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor":
  0.0001, "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
  "time_step_rank": 256, "use_bias": false, "use_conv_bias": true, "use_mamba_kernels": true,
  "vocab_size": 131072
}""")
NEMOTRON_H_8B = _NEMOTRON | json.loads("""{
  "attention_head_dim": 128, "hidden_size": 4096, "hybrid_override_pattern":
  "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "intermediate_size": 21504,
  "mamba_head_dim": 64, "mamba_num_heads": 128, "max_position_embeddings": 8192,
  "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8,
  "num_query_groups": 8, "rms_norm_eps": 1e-05
}""")
NEMOTRON_3_NANO = _NEMOTRON | json.loads("""{
  "head_dim": 128, "hidden_size": 2688, "hybrid_override_pattern":
  "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
  "mamba_head_dim": 64, "mamba_num_heads": 64, "max_position_embeddings": 262144,
  "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
  "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
  "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rope_theta": 10000,
  "routed_scaling_factor": 2.5, "topk_group": 1
}""")
ZAMBA2_2B = COMMON | json.loads("""{
  "model_type": "zamba2", "adapter_rank": 128, "add_bias_linear": false, "attention_head_dim":
  160, "attention_hidden_size": 5120, "chunk_size": 256, "hidden_act": "gelu", "hidden_size":
  2560, "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51], "intermediate_size": 10240,
  "kv_channels": 80, "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_expand": 2, "mamba_headdim":
  64, "mamba_ngroups": 1, "max_position_embeddings": 4096, "n_mamba_heads": 80,
  "num_attention_heads": 32, "num_hidden_layers": 54, "num_key_value_heads": 32,
  "num_logits_to_keep": 1, "num_mem_blocks": 2, "num_query_groups": 32, "rms_norm_eps": 1e-05,
  "rope_theta": 10000, "time_step_floor": 0.0001, "time_step_limit": null, "time_step_max": 0.1,
  "time_step_min": 0.001, "use_conv_bias": true, "use_long_context": false, "use_mamba_kernels":
  true, "use_mem_eff_path": false, "use_mem_rope": false, "use_shared_attention_adapter": false,
  "vocab_size": 32000
}""")
ZAMBA2_2B["layers_block_type"] = [
    "hybrid" if i in ZAMBA2_2B["hybrid_layer_ids"] else "mamba" for i in range(54)
]
# Sizes and fields as readers of these files report them; no published file was opened.
QWEN3_NEXT = COMMON | json.loads("""{
  "model_type": "qwen3_next", "attention_bias": false, "bos_token_id": 151643,
  "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
  "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
  "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
  "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts":
  512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
  "output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
  "shared_expert_intermediate_size": 512, "tie_word_embeddings": false, "use_sliding_window": false,
  "vocab_size": 151936
}""")
_QWEN3_5 = COMMON | json.loads("""{
  "attention_bias": false, "attn_output_gate": true, "dtype": "bfloat16", "eos_token_id": 248044,
  "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
  "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
  "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "output_gate_type": "swish",
  "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved":
  true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
  "rope_type": "default"}, "vocab_size": 248320
}""")
_QWEN3_5["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
_QWEN_VISION = json.loads("""{
  "image_token_id": 248056, "language_model_only": false, "video_token_id": 248057,
  "vision_end_token_id": 248054, "vision_start_token_id": 248053, "vision_config": {"depth": 27}
}""")


def qwen3_5(model_type, num_layers, *, tied=False, **sizes):
    """The config of a released Qwen3.5, a wrapper."""
    text = _QWEN3_5 | {"model_type": f"{model_type}_text", "num_hidden_layers": num_layers}
    text |= {"layer_types": _QWEN3_5["layer_types"] * (num_layers // 4)} | sizes
    return (
        COMMON
        | _QWEN_VISION
        | {"model_type": model_type, "tie_word_embeddings": tied, "text_config": text}
    )


def _sizes(*sizes):
    names = ("hidden_size", "linear_num_value_heads", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "intermediate_size"), sizes, strict=False))


QWEN3_5_08B = qwen3_5("qwen3_5", 24, tied=True, **_sizes(1024, 16, 8, 2, 3584))
QWEN3_5_27B = qwen3_5("qwen3_5", 64, **_sizes(5120, 48, 24, 4, 17408))
QWEN3_8_27B = QWEN3_5_27B | {
    "text_config": QWEN3_5_27B["text_config"] | dict(pad_token_id=None, tie_word_embeddings=False)
}
del QWEN3_8_27B["text_config"]["mlp_only_layers"]
_OF_EXPERTS = dict(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512)
_OF_EXPERTS |= dict(shared_expert_intermediate_size=512)
QWEN3_5_35B = qwen3_5("qwen3_5_moe", 40, **_sizes(2048, 32, 16, 2), **_OF_EXPERTS)
# Sizes as ports of these models quote them; no published file was opened.
_LFM2 = COMMON | json.loads("""{
  "conv_L_cache": 3, "conv_bias": false, "eos_token_id": 7, "max_position_embeddings": 128000,
  "norm_eps": 1e-05, "num_key_value_heads": 8, "rope_theta": 1000000.0, "vocab_size": 65536
}""")
LFM2_350M = _LFM2 | json.loads("""{
  "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_dim": 1024, "block_ff_dim": 6656,
  "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
  "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": true,
  "block_use_xavier_init": true, "conv_dim": 1024, "conv_dim_out": 1024, "conv_use_xavier_init":
  true, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 1024, "num_attention_heads": 16,
  "num_heads": 16, "num_hidden_layers": 16, "use_pos_enc": true
}""")
LFM2_2B = LFM2_350M | json.loads("""{
  "block_auto_adjust_ff_dim": false, "block_dim": 2048, "block_ff_dim": 10752, "conv_dim": 2048,
  "conv_dim_out": 2048, "full_attn_idxs": [2, 5, 9, 13, 17, 21, 24, 27], "hidden_size": 2048,
  "intermediate_size": 10752, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 30,
  "theta": 1000000.0, "tie_embedding": true
}""")
LFM2_1B = LFM2_2B | json.loads("""{
  "block_auto_adjust_ff_dim": true, "block_ff_dim": 12288, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
  "num_hidden_layers": 16
}""")
LFM2_8B = _LFM2 | json.loads("""{
  "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168,
  "moe_intermediate_size": 1792, "norm_topk_prob": true, "num_attention_heads": 32,
  "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
  "routed_scaling_factor": 1.0, "use_expert_bias": true
}""")
LFM2_8B["layer_types"] = [
    "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)
]
# As transformers' defaults are; no published file was opened.
LFM3_2B = COMMON | json.loads("""{
  "model_type": "lfm3", "attention_bias": false, "conv_L_cache": 7, "conv_bias": false,
  "eos_token_id": 124900, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 7680,
  "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 16,
  "num_hidden_layers": 24, "num_key_value_heads": 4, "rope_parameters": {"full_attention":
  {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
  "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}, "sliding_window": 256,
  "tie_word_embeddings": true, "use_attention_gate": true, "use_sandwich_norm": true, "vocab_size":
  128000
}""")
# As engines and ports quote them; no published file was opened.
KIMI_LINEAR_48B = COMMON | json.loads("""{
  "model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
  "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config":
  {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "kda_layers": [1, 2, 3, 5, 6, 7,
  9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], "num_heads": 32,
  "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576,
  "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true,
  "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
  "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads":
  32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": null,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group":
  1, "use_grouped_topk": true, "v_head_dim": 128, "vocab_size": 163840
}""")
LING_3_FLASH = COMMON | json.loads("""{
  "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
  "first_k_dense_replace": 2, "gated_attention_proj_granularity_type": "head_wise", "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 6144, "kda_lower_bound": -5.0,
  "kda_safe_gate": true, "kv_lora_rank": 512, "layer_group_size": 6, "max_position_embeddings":
  262144, "moe_intermediate_size": 768, "moe_router_enable_expert_bias": true,
  "moe_shared_expert_intermediate_size": 768, "n_group": 8, "no_kda_lora": true, "norm_topk_prob":
  true, "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 8,
  "num_hidden_layers": 42, "num_key_value_heads": 32, "num_nextn_predict_layers": 1,
  "num_shared_experts": 1, "partial_rotary_factor": 0.5, "q_lora_rank": null, "qk_nope_head_dim":
  128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": true, "rope_scaling": null,
  "rope_theta": 6000000, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
  "short_conv_kernel_size": 4, "tie_word_embeddings": false, "topk_group": 4, "use_bias": false,
  "use_qk_norm": true, "use_qkv_bias": false, "v_head_dim": 128, "vocab_size": 157184
}""")
LING_3_TINY = LING_3_FLASH | json.loads("""{
  "first_k_dense_replace": 1, "hidden_size": 1536, "intermediate_size": 4608, "layer_group_size": 4,
  "max_position_embeddings": 131072, "moe_intermediate_size": 512,
  "moe_shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 128,
  "num_hidden_layers": 24, "num_key_value_heads": 16, "q_lora_rank": 256
}""")
MAMBA2ATTN = json.loads("""{
  "d_model": 2560, "d_intermediate": 0, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer":
  "Mamba2"}, "attn_layer_idx": [9, 18, 27, 36, 45, 56], "attn_cfg": {"causal": true, "d_conv": 4,
  "head_dim": 128, "num_heads": 30, "out_proj_bias": false, "qkv_proj_bias": false,
  "rotary_emb_dim": 64}, "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true,
  "pad_vocab_size_multiple": 16, "tie_embeddings": true
}""")
LLAMA_3_1_8B = COMMON | json.loads("""{
  "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "model_type": "llama",
  "attention_bias": false, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
  "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
  "tie_word_embeddings": false, "vocab_size": 128256
}""")
# config.json and mamba_config.json. The draft's has the attention settings of another model.
MAMBA_IN_LLAMA_8B = (
    LLAMA_3_1_8B,
    json.loads("""{
  "attn_layers": [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31], "d_inner": 4096,
  "d_model": 4096, "d_xb": 1024, "hidden_act": "silu", "intermediate_size": 14336, "n_layer": 32,
  "rms_norm_eps": 1e-05, "ssm_cfg": {"expand": 1, "ngroups": 32, "d_state": 128}, "vocab_size":
  null
}"""),
)
MAMBA_IN_LLAMA_DRAFT = (
    LLAMA_3_1_8B
    | json.loads("""{
  "head_dim": 128, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 24,
  "num_hidden_layers": 2, "tie_word_embeddings": true
}"""),
    MAMBA_IN_LLAMA_8B[1]
    | json.loads("""{
  "attn_layers": [], "d_inner": 1024, "d_model": 1024, "d_xb": 256, "intermediate_size": 2048,
  "n_layer": 2, "ssm_cfg": {"expand": 1, "ngroups": 8, "d_state": 128}
}"""),
)
# With other sizes. This one has fields of old conversions.
CODESTRAL_HF = """{
  "_name_or_path": "/repo/codestral", "_attn_implementation_autoset": true,
  "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256,
  "conv_kernel": 4, "eos_token_id": [0, 2], "expand": 2, "head_dim": 8, "hidden_act": "silu",
  "hidden_size": 16, "initializer_range": 0.1, "intermediate_size": 32,
  "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 1, "norm_before_gate": true,
  "num_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "rescale_prenorm_residual": false,
  "residual_in_fp32": true, "rms_norm": true, "state_size": 8, "tie_word_embeddings": false,
  "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_limit": [0.0, Infinity],
  "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0,
  "torch_dtype": "bfloat16", "transformers_version": "4.44.0.dev0", "use_bias": false,
  "use_cache": true, "use_conv_bias": true, "vocab_size": 48 }"""

MAMBA2_130M = """{ "d_model": 16, "d_intermediate": 0, "n_layer": 2, "vocab_size": 37,
  "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8}, "attn_layer_idx": [],
  "attn_cfg": {}, "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true,
  "pad_vocab_size_multiple": 16, "tie_embeddings": false }"""


# Fields of mamba_ssm's MambaConfig and, under ssm_cfg, of its Mamba2.
MAMBA_SSM_CONFIGS = {
    "as released": {},
    "groups, D per channel, norm before gate": dict(
        ssm_cfg=dict(ngroups=2, D_has_hdim=True, norm_before_gate=True, d_conv=3),
        tie_embeddings=False,
    ),
    "d_ssm < d_inner, no norm, clamped": dict(
        ssm_cfg=dict(d_ssm=16, rmsnorm=False, dt_limit=[0.01, 0.5], conv_bias=False)
    ),
    "MLP, biases": dict(ssm_cfg=dict(bias=True, ngroups=2), d_intermediate=100),
    # With attention. RoPE on all channels makes every key bias matter.
    "as mamba2attn-2.7b": dict(d_model=32, n_layer=3, attn_layer_idx=[1])
    | dict(attn_cfg=MAMBA2ATTN["attn_cfg"] | dict(head_dim=16, num_heads=3, rotary_emb_dim=8)),
    "grouped queries, biases, MLP in every layer": dict(
        n_layer=3,
        d_intermediate=100,
        attn_layer_idx=[1],
        attn_cfg=dict(
            causal=True, num_heads=4, num_heads_kv=2, rotary_emb_dim=4, rotary_emb_base=100.0
        ),
        tie_embeddings=False,
    ),
    "MLP inside the attention": dict(
        attn_layer_idx=[0],
        attn_cfg=dict(
            causal=True, num_heads=2, mlp_dim=200, d_conv=3, softmax_scale=0.5, rotary_emb_dim=8
        ),
    ),
}


def mamba_ssm_config(**changes):
    """A small config.json of mamba_ssm."""
    config = json.loads(MAMBA2_130M) | {"tie_embeddings": True}
    ssm = config["ssm_cfg"] | changes.pop("ssm_cfg", {})
    return config | {"ssm_cfg": ssm} | changes


# Changes to config.json and mamba_config.json. The sizes are tiny, yet all three cases of llama3's
# frequency scaling occur.
_LLAMA3 = LLAMA_3_1_8B["rope_scaling"] | dict(original_max_position_embeddings=32)
MAMBA_IN_LLAMA_CONFIGS = {
    "untied, llama3 rope": (dict(rope_scaling=_LLAMA3), {}),
    # The mixer's width and number of heads differ from the attention's.
    "tied, plain rope, d_xb < d_inner": (
        dict(tie_word_embeddings=True, num_key_value_heads=1, head_dim=12, rms_norm_eps=1e-3),
        dict(d_inner=64, ssm_cfg=dict(expand=1, ngroups=8, d_state=8), attn_layers=[0]),
    ),
    # As STree's draft model, whose config.json has the attention settings of another model.
    "no attention, tied": (
        dict(tie_word_embeddings=True, num_attention_heads=6, head_dim=16, rope_scaling=_LLAMA3),
        dict(d_xb=8, attn_layers=[]),
    ),
}


def mamba_in_llama_configs(config=(), mamba_config=()):
    """A small config.json and mamba_config.json with these changes."""
    llama = LLAMA_3_1_8B | json.loads("""{
  "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
  "rope_theta": 500.0, "rope_scaling": null, "bos_token_id": 1, "eos_token_id": [2, 3],
  "torch_dtype": "float32"
}""")
    mamba = MAMBA_IN_LLAMA_8B[1] | json.loads("""{
  "d_model": 32, "d_inner": 32, "d_xb": 16, "intermediate_size": 48, "n_layer": 3,
  "attn_layers": [1], "ssm_cfg": {"expand": 1, "ngroups": 4, "d_state": 8}
}""")
    llama |= dict(config)
    return llama, mamba | {"rms_norm_eps": llama["rms_norm_eps"]} | dict(mamba_config)


# zamba2 and nemotron_h clamp the time step at time_step_min in prefill but not in decoding. This is
# a bug: the field is meant for initialisation, and the released models were trained without the
# clamp. A floor below any softplus output disables it. The floor cannot be 0, because transformers
# takes its logarithm. To see the bug, pass time_step_min=0.05.
_NO_FLOOR = 1e-30

_MODEL = dict(vocab_size=64, hidden_size=32, tie_word_embeddings=False)
_MODEL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
_HYBRID = _MODEL | dict(intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
_HYBRID |= dict(max_position_embeddings=64)
_BAMBA = _HYBRID | dict(
    num_hidden_layers=3, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=8
)
_DELTA = (
    _MODEL
    | dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    | dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    | dict(head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
    | dict(linear_key_head_dim=8, linear_value_head_dim=12)
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
_EXPERTS |= dict(moe_intermediate_size=24, shared_expert_intermediate_size=20)
_ROPE = dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.5)
_LATENT = _MODEL | dict(
    num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"]
)
_LATENT |= dict(num_attention_heads=4, linear_num_heads=4, linear_head_dim=8, kv_lora_rank=16)
_LATENT |= dict(qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10, intermediate_size=48)
_LATENT |= dict(num_experts=4, num_experts_per_token=2, moe_intermediate_size=24, topk_group=1)
_SHORT_CONV = _HYBRID | dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
# A small model of each model_type of transformers: arguments of its config.
TRANSFORMERS = dict(
    mamba2=_MODEL
    | dict(num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16, n_groups=4, chunk_size=8),
    bamba=_BAMBA | dict(attn_layer_indices=[1]),
    falcon_h1=_BAMBA | dict(num_hidden_layers=2, mamba_d_ssm=64),
    granitemoehybrid=_BAMBA
    | dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
    | dict(shared_intermediate_size=40, num_local_experts=0, num_experts_per_tok=0),
    nemotron_h=_HYBRID
    | dict(hybrid_override_pattern="M*-M", head_dim=16, mamba_num_heads=4)
    | dict(mamba_head_dim=12, n_groups=2, ssm_state_size=16, chunk_size=8)
    | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    | dict(moe_shared_expert_intermediate_size=40, time_step_min=_NO_FLOOR),
    zamba2=_HYBRID
    | dict(num_hidden_layers=6, layers_block_type=["linear_attention", "hybrid"] * 3)
    | dict(num_key_value_heads=4, num_mem_blocks=2, adapter_rank=4, n_mamba_heads=4)
    | dict(mamba_ngroups=2, mamba_d_state=16, chunk_size=8, time_step_min=_NO_FLOOR),
    qwen3_next=_DELTA | _EXPERTS,
    qwen3_5_text=_DELTA | dict(intermediate_size=48),
    qwen3_5_moe_text=_DELTA | _EXPERTS,
    olmo_hybrid=_DELTA
    | dict(head_dim=8, intermediate_size=48, rope_parameters=dict(rope_theta=None)),
    lara_mini=_DELTA
    | _EXPERTS
    | dict(num_hidden_layers=3, sliding_window=5, tie_word_embeddings=True)
    | dict(layer_types=["linear_attention", "sliding_attention", "full_attention"]),
    kimi_linear=_LATENT | dict(mlp_layer_types=["dense", "sparse", "sparse"]),
    bailing_hybrid=_LATENT
    | dict(head_dim=8, first_k_dense_replace=1, n_group=2, num_nextn_predict_layers=0),
    lfm2=_SHORT_CONV | dict(block_multiple_of=16),
    lfm2_moe=_SHORT_CONV
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1),
    lfm3=_HYBRID
    | dict(num_hidden_layers=5, head_dim=16, sliding_window=5)
    | dict(rope_parameters=dict(full_attention=_ROPE, sliding_attention=dict(rope_theta=30.0))),
)
# A multimodal wrapper of one of them.
QWEN_WRAPPER = dict(
    tie_word_embeddings=True,
    text_config=TRANSFORMERS["qwen3_5_moe_text"],
    vision_config=dict(
        depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, patch_size=2
    )
    | dict(num_position_embeddings=4, deepstack_visual_indexes=[]),
)
# Changes to them. Each tests something that the others do not; together they use every part of the
# released models. A name begins with its model_type.
TRANSFORMERS_CONFIGS = {
    "mamba2": {},
    "mamba2, groups, narrow convolution, biases": dict(
        n_groups=2, conv_kernel=3, use_bias=True, use_conv_bias=False, tie_word_embeddings=True
    ),
    "mamba2, clamped time steps, odd vocabulary": dict(
        time_step_limit=(0.01, 0.5), vocab_size=53, layer_norm_epsilon=1e-3
    ),
    "bamba": {},
    "falcon_h1, multipliers, no norm": dict(
        head_dim=12, mamba_d_ssm=48, mamba_n_heads=3, embedding_multiplier=1.7
    )
    | dict(lm_head_multiplier=0.6, key_multiplier=0.7, attention_in_multiplier=1.2)
    | dict(attention_out_multiplier=0.8, ssm_in_multiplier=1.3, ssm_out_multiplier=0.9)
    | dict(ssm_multipliers=[0.7, 1.1, 0.8, 1.4, 1.2], mlp_multipliers=[0.8, 1.5])
    | dict(tie_word_embeddings=True),
    "falcon_h1, norm before gate, groups": dict(
        mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_n_groups=2
    )
    | dict(time_step_limit=(0.01, 0.5)),
    "granitemoehybrid, dense": dict(position_embedding_type="nope", embedding_multiplier=1.7)
    | dict(residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=3.0)
    | dict(rms_norm_eps=1e-3, tie_word_embeddings=True),
    "granitemoehybrid, experts, rope": dict(
        position_embedding_type="rope", attention_multiplier=0.5, intermediate_size=24
    )
    | dict(num_local_experts=4, num_experts_per_tok=2),
    "nemotron_h": {},
    "nemotron_h, groups of experts": dict(
        hybrid_override_pattern="ME*E", n_routed_experts=6, n_group=2, topk_group=1
    )
    | dict(routed_scaling_factor=2.5),
    "nemotron_h, latent experts": dict(
        hybrid_override_pattern="ME*E", moe_latent_size=20, routed_scaling_factor=2.5
    )
    | dict(layer_norm_epsilon=1e-3),
    "zamba2": dict(use_shared_attention_adapter=True, use_mem_rope=True, tie_word_embeddings=True),
    "qwen3_next, dense layers, narrow convolution": dict(num_hidden_layers=3)
    | dict(layer_types=["full_attention", "linear_attention", "linear_attention"])
    | dict(mlp_only_layers=[1], intermediate_size=48, linear_conv_kernel_dim=3)
    | dict(rms_norm_eps=1e-3),
    "qwen3_5_text, a head for each key head, biases": dict(
        linear_num_key_heads=4, attention_bias=True, tie_word_embeddings=True
    )
    | dict(rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
    "qwen3_5_moe_text": {},
    "olmo_hybrid": {},
    "olmo_hybrid, rope, biases, beta below 1": dict(
        attention_bias=True, linear_allow_neg_eigval=False, rms_norm_eps=1e-3
    )
    | dict(rope_parameters=dict(rope_theta=500.0), linear_key_head_dim=24, linear_num_key_heads=2),
    "lara_mini": {},
    "kimi_linear": {},
    "kimi_linear, heads of another size, narrow convolution, queries of low rank": dict(
        linear_num_heads=2, linear_head_dim=12, linear_conv_kernel_dim=3, q_lora_rank=12
    )
    | dict(rms_norm_eps=1e-3, num_experts=6, n_group=3, topk_group=2, n_shared_experts=2),
    "bailing_hybrid": {},
    "bailing_hybrid, queries of low rank, a decay without bound": dict(
        q_lora_rank=12, kda_safe_gate=False, rope_theta=500.0, norm_topk_prob=False
    ),
    "lfm2, biases, another width, an adjusted size": dict(
        conv_bias=True, conv_L_cache=4, block_ffn_dim_multiplier=1.3, tie_word_embeddings=True
    ),
    "lfm2_moe": dict(routed_scaling_factor=1.5, norm_eps=1e-3),
    "lfm3": {},
    "lfm3, no gate, no norms after, biases": dict(
        use_attention_gate=False, use_sandwich_norm=False, attention_bias=True, conv_bias=True
    )
    | dict(
        conv_L_cache=4,
        layer_types=["conv", "full_attention"],
        num_hidden_layers=2,
        tie_word_embeddings=True,
    ),
}
