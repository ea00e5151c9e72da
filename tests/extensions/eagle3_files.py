"""EAGLE-3 heads in files, with random weights."""

import functools

import numpy as np

from tests.convert import checkpoints

WIDTH, VOCAB, OWN = 16, 37, 20
LAYERS = (1, 2, 4)
CONFIG = dict(
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-3,
    rope_theta=50.0,
    draft_vocab_size=OWN,
    hidden_act="silu",
    tie_word_embeddings=False,
)


@functools.cache
def tensors(vocab=VOCAB, num_inner=3):
    """The tensors of a head, by their names in files."""
    rng = np.random.default_rng(0)
    shapes = {
        "fc": (WIDTH, num_inner * WIDTH),
        "midlayer.input_layernorm": (WIDTH,),
        "midlayer.hidden_norm": (WIDTH,),
        "midlayer.self_attn.q_proj": (32, 2 * WIDTH),
        "midlayer.self_attn.k_proj": (16, 2 * WIDTH),
        "midlayer.self_attn.v_proj": (16, 2 * WIDTH),
        "midlayer.self_attn.o_proj": (WIDTH, 32),
        "midlayer.post_attention_layernorm": (WIDTH,),
        "midlayer.mlp.gate_proj": (24, WIDTH),
        "midlayer.mlp.up_proj": (24, WIDTH),
        "midlayer.mlp.down_proj": (WIDTH, 24),
        "norm": (WIDTH,),
        "lm_head": (OWN, WIDTH),
    }
    made = {
        f"{name}.weight": checkpoints.random_weight(name, shape, rng)
        for name, shape in shapes.items()
    }
    chosen = np.sort(rng.choice(vocab, OWN, replace=False))
    drafted = np.zeros(vocab, bool)
    drafted[chosen] = True
    return made | {"d2t": chosen - np.arange(OWN), "t2d": drafted}


def saved(path, changes=(), own=(), vocab=VOCAB, layers=LAYERS):
    """Writes a head for a target of this vocabulary, with some fields and tensors changed."""
    weights = tensors(vocab, len(layers)) | dict(own)
    weights = {name: value for name, value in weights.items() if value is not None}
    eagle = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
    config = CONFIG | {"vocab_size": vocab, "eagle_config": eagle}
    return checkpoints.write_safetensors(path, config | dict(changes), weights)
