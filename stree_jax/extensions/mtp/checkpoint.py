"""Loading a multi-token-prediction head for its target from any checkpoint that has one."""

import os
from collections.abc import Collection
from typing import Any

from jax.sharding import Mesh

from stree_jax import HybridLM
from stree_jax.heads import FOLDER, is_head, load_head
from stree_jax.messages import shown
from stree_jax.models import MtpHead, check_on_one_device, loaded_for


def load_mtp(
    path: str | os.PathLike[str],
    target: HybridLM,
    mesh: Mesh | None = None,
    *,
    ignore: Collection[str] | Any = (),
) -> MtpHead:
    """Loads a multi-token-prediction head, in the target's dtype.

    Args:
        path: a checkpoint of Nemotron-3 with its head, or a native one: of a target whose folder
            `mtp` has its head, or what `save_mtp` or `stree-jax train-mtp` wrote. Also the name of
            a model on the hub.
        target: the model that it is for, on one device.
        mesh: as in `from_pretrained`; heads do not run on a mesh yet, so only None is accepted.
        ignore: names of unknown config fields to ignore, see `from_pretrained`.

    Raises:
        ValueError: a mesh, or the checkpoint is missing, damaged or quantised, has no head or one
            that is not supported, or the head belongs to another target.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"path must be a directory or the name of a model on the hub, got {shown(path)}"
        )
    if mesh is not None:
        raise ValueError(
            f"mesh = {shown(mesh)}: a multi-token-prediction head runs on one device; leave mesh"
            " out, or draft with a draft model, which a mesh can replicate"
        )
    check_on_one_device(target, "load_mtp")
    from stree_jax.convert import find, is_foreign, load_mtp_head, open_checkpoint  # slow to import

    directory = find(path)
    if is_foreign(directory, ignore=ignore):
        head = load_mtp_head(open_checkpoint(directory, ignore=ignore), target)
    elif is_head(directory):
        head = load_head(directory, target)
    elif (directory / FOLDER).is_dir():
        head = load_head(directory / FOLDER, target)
    else:
        raise ValueError(
            f"{directory} has no multi-token prediction head in a folder {FOLDER}; convert the"
            " original again if it has one, or train one: stree-jax train-mtp RECIPE TARGET OUTPUT"
        )
    return loaded_for(target, head)
