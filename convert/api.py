"""`convert`: from any known checkpoint to a native one or to another program's format."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from stree_jax.checkpoint import write_checkpoint
from stree_jax.checkpoint.directories import new_directory
from stree_jax.checkpoint.files import checked_path, folder_of
from stree_jax.checkpoint.load import quantized_in
from stree_jax.convert.finding import side_files
from stree_jax.convert.reading import Checkpoint, ProgressCallback, load_model, open_checkpoint
from stree_jax.convert.writing import writable, write_as, written_as
from stree_jax.heads import FOLDER, save_head
from stree_jax.models.matrices import check_quantize


def formats() -> tuple[str, ...]:
    """The formats that `convert` can write: "native", "hf", and names of families."""
    return ("native", *writable())


def convert(
    source: str | os.PathLike[str] | Any,
    destination: str | os.PathLike[str] | Any,
    *,
    dtype: DTypeLike | None = None,
    to: str = "native",
    quirks: Collection[str] = (),
    ignore: Collection[str] | Any = (),
    adapter: str | os.PathLike[str] | Any = None,
    progress: ProgressCallback = lambda done, total: None,
    quantize: str | Any = None,
    keep: Collection[str] | Any = (),
) -> str | None:
    """Converts a checkpoint directory. The destination is either complete or absent.

    A multi-token prediction head beside the model goes along: natively it is in the folder `mtp`.

    Args:
        source: a directory or file in any format that `from_pretrained` reads, or the name of a
            model on the hub.
        destination: the directory to create; tokenizer files are copied into it, see `side_files`.
        dtype: dtype of the weights, float32 or bfloat16; None: bfloat16 if the source is bfloat16,
            else float32. `A_log`, `D` and `dt_bias` are always float32.
        to: a format from `formats()`. "hf": the first family of transformers that can represent
            the model.
        quirks: names from `families.QUIRKS`: deviations of other programs from the config, to
            reproduce them.
        ignore: names of unknown config fields to ignore, see `from_pretrained`.
        adapter: a LoRA adapter to merge, see `from_pretrained`.
        progress: callback with the bytes read so far and the total.
        quantize: "int8" or "int4" for matrices in few bits, natively only; see `from_pretrained`.
        keep: names of matrices that stay, see `from_pretrained`.

    Returns:
        Why the source's multi-token prediction head was left out; None: it was not, or there is
        none.

    Raises:
        ValueError: the source cannot be converted, or the destination exists.
    """
    if to not in formats():
        raise ValueError(f"to must be one of {formats()}, got {to!r}")
    check_quantize(quantize, keep)
    if quantize is not None and to != "native":
        raise ValueError(f"quantize = {quantize!r} is for native checkpoints, not for to = {to!r}")
    target = checked_path(destination, "destination", "the directory to create")
    if target.exists():
        raise ValueError(f"{target} exists; choose another name")
    checkpoint = open_checkpoint(source, quirks, ignore, adapter)
    path, config = checkpoint.path, checkpoint.config
    files = side_files(path)
    if to != "native":  # refuse before reading weights
        if quantized_in(checkpoint.tensors):
            raise ValueError(
                f"{path} has matrices in few bits, which are stored natively only; convert the"
                " original"
            )
        written_as(config, to, checkpoint.dtype.name, target)
    described, left_out = checkpoint.head, None
    if described is not None:
        left_out = described.problem or _no_place(described.config, checkpoint, to, target)
    model = load_model(checkpoint, dtype=dtype, progress=progress, quantize=quantize, keep=keep)
    head = checkpoint.load_head(model) if described is not None and left_out is None else None

    def beside(partial: Path) -> None:
        for file in files:
            copy = partial / file.relative_to(folder_of(path))
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        if head is not None and to == "native":
            save_head(head, model, partial / FOLDER)

    if to == "native":
        write_checkpoint(target, {"model": model.config.to_dict()}, model, None, False, beside)
        return left_out
    with new_directory(target) as partial:
        write_as(model, partial, to, head)
        beside(partial)
    return left_out


def _no_place(head: Any, checkpoint: Checkpoint, to: str, target: Path) -> str | None:
    """Says why a format has no place for a head; None: it has."""
    if to == "native":
        return None
    try:
        written_as(checkpoint.config, to, checkpoint.dtype.name, target, head)
    except ValueError as error:
        return str(error)
    return None
