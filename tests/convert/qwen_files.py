"""Small checkpoints of Qwen3.5 as they are released, with random weights."""

import json

import jax
import numpy as np
from flax import nnx

import stree_jax as st
from stree_jax.convert.writing import write_as
from tests.convert import checkpoints

MLP, EXPERTS = st.MlpConfig(24), st.MoeConfig(4, 2, 8, shared_size=12, shared_gate=True)
DELTA = st.GatedDeltaConfig(num_heads=4, head_dim=4, num_groups=2, state_size=8)
ATTENTION = st.AttentionConfig(4, 2, 8, rotary_dim=4, qk_norm_eps=1e-6, output_gate=True)


def config_of(after, **more):
    return st.ModelConfig(
        vocab_size=37,
        d_model=16,
        layers=(DELTA, after, ATTENTION, after),
        norm_eps=1e-6,
        norm_float32=True,
        residual_float32=False,
        **more,
    )


def random_head(target):
    """A head like the target's last layers."""
    config = target.config
    sizes = st.MtpConfig(config.d_model, ATTENTION, config.layers[-1], 1e-6, norm_float32=True)
    head = st.MtpHead(sizes, rngs=nnx.Rngs(1))
    rng = np.random.default_rng(1)
    state = jax.tree.map_with_path(
        lambda path, leaf: jax.numpy.asarray(
            checkpoints.random_weight(jax.tree_util.keystr(path, simple=True), leaf.shape, rng)
        ),
        nnx.state(head),
    )
    nnx.update(head, state)
    return head


def merged(tensors):
    """With all experts of a layer in one tensor, as Qwen3.5 is released."""
    others = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in tensors.keys() - others.keys()}:
        gate, up, down = (
            np.stack([tensors[f"{layer}.experts.{i}.{name}_proj.weight"] for i in range(4)])
            for name in ("gate", "up", "down")
        )
        others[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        others[f"{layer}.experts.down_proj"] = down
    return others


def wrapped(path, name, changes=(), lacks=()):
    """A released checkpoint of this `model_type`, with its head and a vision tower."""
    from safetensors.numpy import load_file

    of_text = path.with_name(f"{path.name}-text")
    of_text.mkdir()
    target = checkpoints.random_model(config_of(EXPERTS if name.endswith("moe") else MLP))
    write_as(target, of_text, f"{name}_text", random_head(target))
    values = json.loads((of_text / "config.json").read_text())
    outer = {"model_type": name, "tie_word_embeddings": values.pop("tie_word_embeddings")}
    outer |= {"vision_config": {"model_type": "vision"}, "text_config": values | dict(changes)}
    tensors = {
        key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: own
        for key, own in merged(load_file(of_text / "model.safetensors")).items()
        if key not in lacks
    }
    tensors |= {"model.visual.pos_embed.weight": np.ones((2, 2), np.float32)}
    return checkpoints.write_safetensors(path, outer, tensors)
