"""Checkpoints of a tiny Ling 3 with its multi-token prediction head, with random weights."""

import functools

import numpy as np

from stree_jax.testing import HYBRIDS
from tests.convert import checkpoints
from tests.extensions.mtp_files import target_files, written
from tests.numpy_parts import within


@functools.cache
def files():
    """Config and tensors of the target, and of its head: the last layer again, and around it."""
    values, tensors = target_files(HYBRIDS["bailing_hybrid"], "hf")
    width, last, new = values["hidden_size"], "model.layers.1.", "model.layers.2."
    norms = (f"{new}{name}.weight" for name in ("enorm", "hnorm", "final_layernorm"))
    shapes = dict.fromkeys(norms, (width,)) | {f"{new}eh_proj.weight": (width, 2 * width)}
    head = checkpoints.random_weights(shapes, np.random.default_rng(1))
    layer = {f"{new}{name}": tensor for name, tensor in within(last, tensors).items()}
    return values, tensors, layer | head


def saved(path, changes=(), tensors=None):
    """Writes the checkpoint, with some fields changed, and other tensors of the head."""
    return written(path, files(), {"num_nextn_predict_layers": 1} | dict(changes), tensors)
