"""EAGLE-3 heads in files, with random weights."""

import functools
import json

import numpy as np

from tests.convert import checkpoints

WIDTH, VOCAB, OWN = 16, 37, 20
LAYERS = (1, 2, 4)
# Of a layer, as DFlash heads have several.
SIZES = json.loads("""{
  "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 8, "rms_norm_eps": 0.001, "rope_theta": 50.0, "hidden_act": "silu"
}""")
CONFIG = SIZES | json.loads("""{
  "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
  "draft_vocab_size": 20, "tie_word_embeddings": false
}""")


def layer_shapes(inputs=WIDTH):
    """The matrices and norms of a layer whose attention has so many inputs."""
    return {
        "input_layernorm": (WIDTH,),
        "self_attn.q_proj": (32, inputs),
        "self_attn.k_proj": (16, inputs),
        "self_attn.v_proj": (16, inputs),
        "self_attn.o_proj": (WIDTH, 32),
        "post_attention_layernorm": (WIDTH,),
        "mlp.gate_proj": (24, WIDTH),
        "mlp.up_proj": (24, WIDTH),
        "mlp.down_proj": (WIDTH, 24),
    }


@functools.cache
def tensors(vocab=VOCAB, num_inner=3):
    """The tensors of a head, by their names in files."""
    rng = np.random.default_rng(0)
    shapes = {
        "fc": (WIDTH, num_inner * WIDTH),
        "midlayer.hidden_norm": (WIDTH,),
        **{f"midlayer.{name}": shape for name, shape in layer_shapes(2 * WIDTH).items()},
        "norm": (WIDTH,),
        "lm_head": (OWN, WIDTH),
    }
    made = checkpoints.random_weights({f"{name}.weight": shapes[name] for name in shapes}, rng)
    chosen = np.sort(rng.choice(vocab, OWN, replace=False))
    drafted = np.zeros(vocab, bool)
    drafted[chosen] = True
    return made | {"d2t": chosen - np.arange(OWN), "t2d": drafted}


def saved(path, changes=(), replaced=(), vocab=VOCAB, layers=LAYERS):
    """Writes a head for a target of this vocabulary, with some fields and tensors changed."""
    weights = tensors(vocab, len(layers)) | dict(replaced)
    eagle = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
    config = CONFIG | {"vocab_size": vocab, "eagle_config": eagle}
    return checkpoints.write_safetensors(path, config | dict(changes), weights)
