"""Native checkpoints of multi-token-prediction heads, each for one target.

config.json says `"kind": "mtp"` and has the head's config and a sketch of the target's weights. The
other files are those of `stree_jax.checkpoint`. A checkpoint of a target may have its head in the
folder `mtp`.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from stree_jax.checkpoint import load_header, load_module, write_checkpoint
from stree_jax.models.lm import HybridLM, check_on_one_device
from stree_jax.models.matrices import named_weights
from stree_jax.models.mtp import MtpConfig, MtpHead

# What an extension may use.
__all__ = ["FOLDER", "abstract_head", "head_config", "is_head", "load_head", "save_head"]

KIND = "mtp"  # `kind` in config.json
FOLDER = "mtp"  # of the head inside of a target's checkpoint
_SAMPLE = 1024  # numbers of each weight in the sketch


def save_head(
    head: MtpHead,
    target: HybridLM,
    path: str | os.PathLike[str],
    *,
    model_card: str | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a head with a sketch of the target that it is for.

    Args:
        head: the head; weights are stored in their current dtype.
        target: the model that it is for.
        path: the directory to create.
        model_card: Markdown to store as README.md.
        overwrite: replace an existing directory, as `save_pretrained` does.

    Raises:
        ValueError: `path` is not a path, or exists and `overwrite` is False; or the target is on a
            mesh.
    """
    check_on_one_device(target, "a multi-token-prediction head")
    header = {"kind": KIND, "head": head.config.to_dict(), "target": sketch(target)}
    write_checkpoint(path, header, head, model_card, overwrite)


def is_head(path: Path) -> bool:
    """Whether a native checkpoint is a head."""
    return load_header(path)[1].get("kind") == KIND


def head_config(path: str | os.PathLike[str]) -> MtpConfig:
    """The config of a native checkpoint of a head.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged.
    """
    return _open(path)[1]


def load_head(path: str | os.PathLike[str], target: HybridLM) -> MtpHead:
    """Loads a native checkpoint of a head for its target, in the target's dtype.

    Raises:
        ValueError: the checkpoint is missing or damaged, or belongs to another target.
    """
    check_on_one_device(target, "a multi-token-prediction head")
    path, config, header = _open(path)
    if header.get("target") != sketch(target):
        raise ValueError(
            f"the multi-token-prediction head in {path} is for another target; load that one, or"
            " train a head for this one: stree-jax train-mtp RECIPE TARGET OUTPUT"
        )
    return load_module(path, abstract_head(config, target))


def abstract_head(config: MtpConfig, target: HybridLM | None = None) -> MtpHead:
    """A head without weights, in the dtype of the target and with its kernels."""
    options: dict[str, Any] = {}
    if target is not None:
        options = dict(dtype=target.dtype, implementation=target.implementation)
    return nnx.eval_shape(lambda: MtpHead(config, rngs=nnx.Rngs(0), **options))


def sketch(model: HybridLM) -> str:
    """SHA-256 of some numbers of every weight as bfloat16: the same in any dtype.

    Any training changes it. Reading all weights of a large target would take minutes.
    """
    total = hashlib.sha256()
    for name, leaf in named_weights(model):
        total.update(f"{name} {leaf.shape}".encode())
        first = _first(leaf)
        total.update(np.asarray(first).tobytes())
    return total.hexdigest()


@jax.jit
def _first(leaf: jax.Array) -> jax.Array:
    """The first numbers of a weight, without a copy of it."""
    row = leaf[(0,) * (leaf.ndim - 1)] if leaf.ndim else leaf[None]
    return row[:_SAMPLE].astype(jnp.bfloat16)


def _open(path: str | os.PathLike[str]) -> tuple[Path, MtpConfig, dict[str, Any]]:
    path, header = load_header(path)
    if header.get("kind") != KIND:
        raise ValueError(f"{path} has no multi-token-prediction head")
    try:
        return path, MtpConfig.from_dict(header.get("head")), header
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'} is damaged: {error}") from None
