"""Native checkpoints of Medusa heads, each for one target.

config.json says `"kind": "medusa"` and has a digest of the target's weights. The other files are
those of `stree_jax.checkpoint`.
"""

import hashlib
import os

import jax.numpy as jnp
import numpy as np
from flax import nnx

from stree_jax import HybridLM
from stree_jax.checkpoint import load_header, load_module, write_checkpoint
from stree_jax.extensions.medusa.heads import MAX_HEADS, MedusaHeads
from stree_jax.messages import shown
from stree_jax.models import check_on_one_device, loaded_for, named_weights

KIND = "medusa"  # `kind` in config.json


def save_medusa(
    heads: MedusaHeads,
    target: HybridLM,
    path: str | os.PathLike[str],
    *,
    model_card: str | None = None,
    overwrite: bool = False,
) -> None:
    """Saves Medusa heads with a digest of the target that they were trained for.

    Args:
        heads: the heads; weights are stored in their current dtype.
        target: the model that they were trained for.
        path: the directory to create.
        model_card: Markdown to store as README.md.
        overwrite: replace an existing directory, as `save_pretrained` does.

    Raises:
        ValueError: `path` is not a path, or exists and `overwrite` is False.
    """
    check_on_one_device(target, "save_medusa")
    header = {"kind": KIND, "num_heads": heads.num_heads, "target": digest(target)}
    write_checkpoint(path, header, heads, model_card, overwrite)


def load_medusa(path: str | os.PathLike[str], target: HybridLM) -> MedusaHeads:
    """Loads Medusa heads for their target, in the target's dtype.

    Args:
        path: a directory that `save_medusa` or `stree-jax medusa` wrote.
        target: the model that they were trained for.

    Raises:
        ValueError: the checkpoint is missing or damaged, or belongs to another target.
    """
    check_on_one_device(target, "load_medusa")
    path, header = load_header(path)
    if header.get("kind") != KIND:
        raise ValueError(f"{path} has no Medusa heads; it is a model, for from_pretrained")
    number = header.get("num_heads")
    if type(number) is not int or not 1 <= number <= MAX_HEADS:
        raise ValueError(f"{path / 'config.json'} is damaged: num_heads = {shown(number)}")
    if header.get("target") != digest(target):
        raise ValueError(
            f"the Medusa heads in {path} were trained with another target; load that one, or train"
            " heads for this one: stree-jax medusa RECIPE TARGET OUTPUT"
        )
    like = nnx.eval_shape(lambda: MedusaHeads(target, num_heads=number, rngs=nnx.Rngs(0)))
    return loaded_for(target, load_module(path, like))


def check_medusa(path: str | os.PathLike[str]) -> None:
    """Refuses a directory that is not a checkpoint of Medusa heads."""
    path, header = load_header(path)
    if header.get("kind") != KIND:
        raise ValueError(f"{path} has no Medusa heads")


def digest(model: HybridLM) -> str:
    """SHA-256 of the weights as bfloat16: the same for a target loaded in any dtype."""
    total = hashlib.sha256()
    for name, leaf in named_weights(model):
        total.update(name.encode())
        total.update(np.asarray(leaf.astype(jnp.bfloat16)).tobytes())
    return total.hexdigest()
