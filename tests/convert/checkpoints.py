"""Random checkpoints of every family: written from descriptions, or saved by transformers.

What transformers saves needs torch and transformers. A missing package skips the test, except in
the first leg of CI, where it is an error.
"""

import json
import os

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import convert, open_checkpoint
from tests.convert import configs, numpy_mamba_in_llama, numpy_mamba_ssm


def mamba_ssm_weights(config, seed=0):
    """Random float32 weights under mamba_ssm's names."""
    rng = np.random.default_rng(seed)
    weights = {
        name: random_weight(name, shape, rng)
        for name, shape in numpy_mamba_ssm.shapes(config).items()
    }
    if config["tie_embeddings"]:
        weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    return weights


def mamba_ssm_checkpoint(path, config, seed=0):
    """Writes a random checkpoint of mamba_ssm; returns its weights by name."""
    weights = mamba_ssm_weights(config, seed)
    write_safetensors(path, config, weights)
    return weights


def mamba_in_llama_weights(config, mamba_config, seed=0):
    """Random float32 weights under MambaInLlama's names, without a tied head."""
    rng = np.random.default_rng(seed)
    return {
        name: random_weight(name, shape, rng)
        for name, shape in numpy_mamba_in_llama.shapes(config, mamba_config).items()
    }


def mamba_in_llama_checkpoint(path, config, mamba_config, seed=0):
    """Writes a random checkpoint in the released layout; returns its weights by name."""
    weights = mamba_in_llama_weights(config, mamba_config, seed)
    write_safetensors(path, config, weights)
    (path / "mamba_config.json").write_text(json.dumps(mamba_config))
    return weights


def random_weight(name, shape, rng):
    """Random float32 weights, scaled so that every parameter changes the logits."""
    noise = rng.normal(size=shape)
    if name.endswith("A_log"):
        value = rng.uniform(-1, 2, shape)
    elif name.endswith("dt_bias"):
        value = rng.uniform(-4, 1, shape)
    elif "norm" in name or name.endswith(".D"):
        value = 1 + 0.3 * noise
    elif "bias" in name:
        value = 0.2 * noise
    elif "conv1d" in name:
        value = 0.5 * noise
    elif "embed" in name:
        value = noise
    elif "adapter" in name or name.endswith(".linear.weight"):
        # zamba2 normalises their output; larger weights amplify rounding errors a hundredfold.
        value = 0.4 * noise * shape[-1] ** -0.5
    else:
        value = noise * shape[-1] ** -0.5
    return value.astype(np.float32)


def random_model(config, dtype="float32"):
    """A model of the library with such weights; nothing is compiled."""
    structure, abstract = st.HybridLM.abstract(config, dtype=dtype)
    rng = np.random.default_rng(0)
    weights = jax.tree.map_with_path(
        lambda path, leaf: jax.numpy.asarray(
            random_weight(jax.tree_util.keystr(path, simple=True), leaf.shape, rng), leaf.dtype
        ),
        abstract,
    )
    return nnx.merge(structure, weights)


def write_safetensors(path, config, weights, name="model.safetensors"):
    """Writes a checkpoint directory with these tensors."""
    from safetensors.numpy import save_file

    path.mkdir(exist_ok=True)
    save_file({key: np.ascontiguousarray(value) for key, value in weights.items()}, path / name)
    config_name = "params.json" if "dim" in config else "config.json"
    (path / config_name).write_text(json.dumps(config))
    return path


def torch():
    """The torch package."""
    return _imported("torch")


def transformers():
    """The transformers package."""
    return _imported("transformers")


def _imported(name):
    if os.environ.get("STREE_JAX_PEERS") == "required":
        module = __import__(name)
    else:
        module = pytest.importorskip(name)
    if name == "torch":
        module.set_num_threads(1)
    return module


def hf_checkpoint(path, seed=0, **changes):
    """A random transformers mamba2 model, saved by transformers; returns the model."""
    config = transformers().Mamba2Config(
        **dict(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=8,
            state_size=16,
            n_groups=4,
            chunk_size=8,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        | changes
    )
    model = transformers().Mamba2ForCausalLM(config).eval()
    _randomise(model, seed)
    model.save_pretrained(path)
    return model


def hf_weights(model):
    """The saved tensors of a model by their names in memory; tied tensors once."""
    saved = model.state_dict()
    # Most buffers are computed from the config, such as falcon_h1's mup_vector. nemotron_h's router
    # bias is a saved one.
    return dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in saved
    }


def _randomise(model, seed):
    rng = np.random.default_rng(seed)
    with torch().no_grad():
        for name, tensor in hf_weights(model).items():
            tensor.copy_(torch().from_numpy(random_weight(name, tuple(tensor.shape), rng)))


def hf_logits(model, tokens):
    """Logits `[B, T, V]` of a full forward pass, without a cache."""
    with torch().no_grad():
        out = model(torch().tensor(np.asarray(tokens), dtype=torch().long), use_cache=False)
    return out.logits.float().numpy()


def hybrid_checkpoint(path, model_type, seed=0, **changes):
    """A random hybrid of this model_type, saved by transformers; returns the model."""
    settings = configs.HYBRID_DEFAULTS | configs.HYBRID_MODELS[model_type] | changes
    config = transformers().AutoConfig.for_model(model_type, **settings)
    model = transformers().AutoModelForCausalLM.from_config(config).eval()
    _randomise(model, seed)
    model.save_pretrained(path)
    return model


# A small mamba_ssm checkpoint, for tests that damage it.
CONFIG = configs.mamba_ssm_config(tie_embeddings=False)
WEIGHTS = mamba_ssm_weights(CONFIG)
MIXER = "backbone.layers.1.mixer"


def refused(path, message):
    """Every reader refuses the checkpoint, and `convert` leaves nothing behind."""
    for use in (open_checkpoint, st.from_pretrained, lambda p: convert(p, path.parent / "out")):
        with pytest.raises(ValueError, match=message) as error:
            use(path)
        # The path, and at most 300 characters of the value that is wrong.
        assert len(str(error.value).replace(str(path), "")) < 700
    assert not [entry for entry in path.parent.iterdir() if "out" in entry.name]


def rewritten(checkpoint, **changes):
    """The checkpoint with other tensors; None removes one."""
    weights = {name: value for name, value in (WEIGHTS | changes).items() if value is not None}
    return write_safetensors(checkpoint, CONFIG, weights)


def sharded(checkpoint):
    """The checkpoint in two files and an index."""
    from safetensors.numpy import save_file

    names = sorted(WEIGHTS)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        tensors = {name: WEIGHTS[name] for name in names if weight_map[name] == part}
        save_file(tensors, checkpoint / part)
    (checkpoint / "model.safetensors").unlink()
    return weight_map


def write_index(checkpoint, weight_map):
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
