"""Checkpoints of a tiny Nemotron-3 with its multi-token prediction head, with random weights."""

import functools
import tempfile
from pathlib import Path

import numpy as np

import stree_jax as st
from stree_jax.convert.writing import write_as
from stree_jax.testing import HYBRIDS
from tests.convert import checkpoints, numpy_nemotron_h

KEYS = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}
IGNORED = {"mtp_use_repeated_layer": True, "keep_mtp_spec_in_bf16": True, "n_shared_experts": 1}


def shapes(config):
    """The tensors of a head: two layers of Nemotron-H, and what joins and norms."""
    width, layers = config["hidden_size"], {"layers_block_type": ["attention", "moe"]}
    own = numpy_nemotron_h.shapes(config | layers, "mtp").items()
    return {name: shape for name, shape in own if ".layers." in name} | {
        "mtp.layers.0.enorm.weight": (width,),
        "mtp.layers.0.hnorm.weight": (width,),
        "mtp.layers.0.eh_proj.weight": (width, 2 * width),
        "mtp.layers.1.final_layernorm.weight": (width,),
    }


def target_files(config, to):
    """Config and tensors of a random target, as another program has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_as(checkpoints.random_model(config), path, to)
        return checkpoints.read(path)


@functools.cache
def files(latent=True):
    """Config and tensors of the target, and tensors of its head."""
    config = HYBRIDS["nemotron_h"]
    if not latent:
        config = config.with_layers(
            ("mamba2", "attention", "moe"),
            moe=st.MoeConfig(**{**vars(config.moe), "latent_size": None}),
        )
    values, tensors = target_files(config, "hf")
    head = checkpoints.random_weights(shapes(values), np.random.default_rng(1))
    return values, tensors, head


def written(path, files, fields, tensors):
    """Writes a checkpoint of such files, with some fields, and maybe other tensors of the head."""
    values, target, head = files
    tensors = target | (head if tensors is None else tensors)
    return checkpoints.write_safetensors(path, values | fields, tensors)


def saved(path, changes=(), tensors=None, latent=True):
    """Writes the checkpoint, with some fields changed, and other tensors of the head."""
    return written(path, files(latent), KEYS | IGNORED | dict(changes), tensors)
