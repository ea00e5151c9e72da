"""Random checkpoints of every family: written from descriptions, or saved by transformers.

What transformers saves needs torch and transformers. A missing package skips the test, except in
the first leg of CI, where it is an error.
"""

import copy
import json
import os
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import convert, open_checkpoint
from tests.convert import configs, numpy_mamba_in_llama, numpy_mamba_ssm
from tests.helpers import refusal

# Models that no program here can run, described in NumPy: a module with the shapes of the tensors
# and the logits; its configs, of config.json and of the file beside it; the format that holds them.
DESCRIBED = {
    name: (numpy_mamba_ssm, [configs.mamba_ssm_config(**changes)], "mamba_ssm")
    for name, changes in configs.MAMBA_SSM_CONFIGS.items()
} | {
    name: (numpy_mamba_in_llama, configs.mamba_in_llama_configs(*changes), "mamba_in_llama")
    for name, changes in configs.MAMBA_IN_LLAMA_CONFIGS.items()
}


def described_weights(module, *files):
    """Random float32 weights under the names of a described model."""
    return random_weights(module.shapes(*files), np.random.default_rng(0))


def described_checkpoint(path, module, config, *beside):
    """Writes a random checkpoint of a described model; returns its weights by name."""
    weights = described_weights(module, config, *beside)
    write_safetensors(path, config, weights)
    for values in beside:
        (path / "mamba_config.json").write_text(json.dumps(values))
    return weights


def random_weight(name, shape, rng):
    """Random float32 weights, scaled so that every parameter changes the logits."""
    noise = rng.normal(size=shape)
    if name.endswith("A_log"):
        value = rng.uniform(-1, 2, shape)
    elif name.endswith("dt_bias"):
        value = rng.uniform(-4, 1, shape)
    elif "norm" in name or name.endswith(".D"):
        value = np.round(256 * (1 + 0.3 * noise)) / 256  # so that 1 + w and back is exact
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


def random_weights(shapes, rng):
    return {name: random_weight(name, shape, rng) for name, shape in shapes.items()}


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
    """Writes a checkpoint directory with these tensors; None is no tensor."""
    from safetensors.numpy import save_file

    path.mkdir(exist_ok=True)
    there = {key: np.ascontiguousarray(x) for key, x in weights.items() if x is not None}
    save_file(there, path / name, metadata={"format": "pt"})  # as transformers writes
    config_name = "params.json" if "dim" in config else "config.json"
    (path / config_name).write_text(json.dumps(config))
    return path


def read(path):
    """Config and tensors of such a directory."""
    from safetensors.numpy import load_file

    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


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


def hf_checkpoint(path, model_type="mamba2", seed=0, auto="AutoModelForCausalLM", **changes):
    """A random model of this model_type, saved by transformers; returns the model."""
    settings = configs.TRANSFORMERS.get(model_type, {}) | changes
    config = transformers().AutoConfig.for_model(model_type, **settings)
    model = getattr(transformers(), auto).from_config(config).eval()
    rng = np.random.default_rng(seed)
    with torch().no_grad():
        for name, tensor in hf_weights(model).items():
            tensor.copy_(torch().from_numpy(random_weight(name, tuple(tensor.shape), rng)))
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


def hf_logits(model, tokens):
    """Logits `[B, T, V]` in float64: transformers' float32 rounds as ours does."""
    lifted = copy.deepcopy(model).double()
    lifted.set_experts_implementation("eager")  # the others are not for float64
    tensor = torch().Tensor
    with (
        mock.patch.object(torch(), "float32", torch().float64),
        mock.patch.object(tensor, "float", tensor.double),
        torch().no_grad(),
    ):
        out = lifted(torch().tensor(np.asarray(tokens), dtype=torch().long), use_cache=False)
    return out.logits.numpy()


# A small mamba_ssm checkpoint, for tests that damage it.
CONFIG = configs.mamba_ssm_config(tie_embeddings=False)
WEIGHTS = described_weights(numpy_mamba_ssm, CONFIG)
MIXER = "backbone.layers.1.mixer"


def inspected(path):
    """What `inspect` prints."""
    from rich.console import Console

    from stree_jax.cli.convert import Inspect, run_inspect

    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=400, file=nowhere)
        run_inspect(Inspect(path=str(path), tensors=False, adapter=None, ignore_field=[]), console)
    return console.export_text()


def refused(path, message):
    """Every reader refuses the checkpoint, and `convert` leaves nothing behind."""
    for use in (open_checkpoint, st.from_pretrained, lambda p: convert(p, path.parent / "out")):
        # The path, and at most 300 characters of the value that is wrong.
        assert len(refusal(message, use, path).replace(str(path), "")) < 700
    assert not [entry for entry in path.parent.iterdir() if "out" in entry.name]


def rewritten(checkpoint, **changes):
    """The checkpoint with other tensors; None removes one."""
    return write_safetensors(checkpoint, CONFIG, WEIGHTS | changes)


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
