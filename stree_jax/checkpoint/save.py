"""Saving models and other modules."""

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from pallas_kernels.matmul import QuantizedMatrix
from stree_jax.checkpoint.arrays import SCALES, VALUES, check_written, write_checksums
from stree_jax.checkpoint.directories import is_plain, new_directory, plain_path
from stree_jax.checkpoint.files import checked_path
from stree_jax.checkpoint.load import FORMAT, QUANTIZED_VERSIONS, VERSION
from stree_jax.checks import require
from stree_jax.mesh.hosts import by_first
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.mesh.weights import canonical_weights
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.models.matrices import in_first, quantized_kinds
from stree_jax.names import flatten, unflatten


@jax.transfer_guard("allow")
def save_pretrained(
    model: HybridLM,
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    model_card: str | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a model as a native checkpoint directory, independent of the model's mesh.

    All processes call this with the same arguments. Process 0 writes, and all return when the
    checkpoint is complete.

    Args:
        model: the model; weights are stored in their current dtype. Process 0 holds all weights of
            a model on a mesh.
        path: the directory to create, on a file system that all processes share.
        tokenizer: stored as tokenizer.json.
        model_card: Markdown, stored as README.md.
        overwrite: replace an existing directory. The old one stays until the new one is complete.

    Raises:
        ValueError: `path` is not a path, or exists and `overwrite` is False; or `model` is not a
            model.
    """
    check_model(model)

    def more_files(partial: Path) -> None:
        if tokenizer is not None:
            text = tokenizer.to_str(pretty=True)
            (partial / "tokenizer.json").write_text(text, encoding="utf-8")

    header = {"model": model.config.to_dict()}
    write_checkpoint(path, header, model, model_card, overwrite, more_files)


def write_checkpoint(
    path: str | os.PathLike[str],
    header: dict[str, Any],
    weights: nnx.Module,
    model_card: str | None,
    overwrite: bool,
    more_files: Callable[[Path], None] | None = None,
) -> None:
    """Writes a directory with config.json, weights, model card and `more_files`.

    All processes call this, and process 0 writes.
    """
    target = checked_path(path, "path", "the directory to create")
    from orbax.checkpoint import v1 as ocp  # takes half a second to import

    with contextlib.ExitStack() as stack:

        def begin() -> str:
            require(  # Orbax wants one path, and a link is on one machine
                jax.process_count() == 1 or is_plain(target),
                f"several processes cannot save to {target}: use a path without any of []*?\\",
            )
            partial = stack.enter_context(new_directory(target, overwrite))
            kinds = quantized_kinds(weights).values()
            version = max([VERSION, *(QUANTIZED_VERSIONS[kind] for kind in kinds)])
            full_header = {"format": FORMAT, "version": version} | header
            (partial / "config.json").write_text(json.dumps(full_header, indent=2) + "\n")
            if model_card is not None:
                (partial / "README.md").write_text(model_card)
            if more_files is not None:
                more_files(partial)
            return str(partial)

        partial = Path(by_first(begin))
        arrays = _canonical_arrays(weights)
        logger = logging.getLogger("absl")
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # Orbax logs errors of its threads, and raises them too
        try:
            ocp.save(plain_path(partial) / "params", arrays)  # all processes must call it
        finally:
            logger.setLevel(level)

        def end() -> str:
            write_checksums(partial, flatten(arrays))
            check_written(partial)  # before an old one goes
            stack.close()  # renames the directory
            return ""

        by_first(end)


def _canonical_arrays(weights: nnx.Module) -> dict[str, Any]:
    """The arrays to store, two for a matrix in few bits; values in process 0 only."""

    def kept(values: Any) -> Any:
        if jax.process_index() == 0:
            return values
        return np.broadcast_to(np.zeros((), values.dtype), values.shape)  # takes no memory

    arrays = nnx.to_pure_dict(nnx.state(in_first(weights)))
    if isinstance(weights, HybridLM) and weights.partition != ONE_DEVICE:
        readers = canonical_weights(weights)
        values = {name: jax.tree.map(kept, read()) for name, read in readers.items()}
        arrays = unflatten(values, arrays)
    elif jax.process_count() > 1:  # Orbax refuses arrays of one process's devices
        arrays = jax.tree.map(lambda array: kept(np.asarray(array)), arrays)
    parts = {
        name: {VALUES[1:]: weight.values, SCALES[1:]: weight.scales}
        if isinstance(weight, QuantizedMatrix)
        else weight
        for name, weight in flatten(arrays).items()
    }
    return unflatten(parts, arrays)
