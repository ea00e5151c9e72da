"""`convert`: any checkpoint in, a native or a transformers one out."""

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from jax.typing import DTypeLike

from stree_jax.checkpoint import (
    first_line,
    from_pretrained,
    new_directory,
    read_json,
    save_pretrained,
)
from stree_jax.convert.families import WRITABLE, layout, written_as
from stree_jax.convert.reading import Progress, load_model, open_checkpoint
from stree_jax.convert.writing import write_as

FORMATS = ("native", *WRITABLE)

# What a tokenizer or a generation needs and a conversion does not change.
_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tokenizer.model.v3",
    "generation_config.json",
)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    to: str = "native",
    quirks: Collection[str] = (),
    progress: Progress = lambda done, total: None,
) -> None:
    """Converts a checkpoint directory. The destination is complete or absent.

    Args:
        source: a directory in any format that `from_pretrained` takes, or the name of a model on
            the hub.
        destination: the directory to create; tokenizer files are copied into it.
        dtype: of the weights, float32 or bfloat16; None: bfloat16 if the source is, else float32.
            `A_log`, `D` and `dt_bias` are float32 whatever it is.
        to: "native"; "hf", which is the family of transformers that can hold the model; or the name
            of a family, see `FORMATS`.
        quirks: of `families.QUIRKS`, to reproduce what other programs do against the config.
        progress: called with bytes read and in all.

    Raises:
        ValueError: the source cannot be converted, or the destination exists.
    """
    if to not in FORMATS:
        raise ValueError(f"to must be one of {FORMATS}, got {to!r}")
    path, target = find(source), Path(destination)
    if target.exists():
        raise ValueError(f"{target} exists; choose another name")
    if is_native(path):
        if quirks:
            raise ValueError(f"{path} is native; quirks are for converting what others wrote")
        model = from_pretrained(path, dtype=dtype)
    else:
        checkpoint = open_checkpoint(path, quirks)
        if to != "native":  # refuses before the work
            written_as(checkpoint.description.config, to, checkpoint.dtype.name, target)
        model = load_model(
            checkpoint, dtype=checkpoint.dtype if dtype is None else dtype, progress=progress
        )
    files = [path / name for name in _BESIDE if (path / name).is_file()]
    if to == "native":
        save_pretrained(model, target, files=files)
        return
    with new_directory(target) as partial:
        write_as(model, partial, to)
        for file in files:
            shutil.copyfile(file, partial / file.name)


def is_native(path: Path) -> bool:
    """Whether a directory says that it is of our own format."""
    file = path / "config.json"
    return file.is_file() and "format" in read_json(file)


def find(name: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint: `name` itself, or where the hub's copy of it lies.

    Raises:
        ValueError: there is neither.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path} is a file; a checkpoint is a directory")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name), re.ASCII):
        raise ValueError(f"no checkpoint at {path}: there is no such directory")
    configs = [*_BESIDE, "config.json", "params.json", "mamba_config.json", "*.index.json"]
    path = _download(str(name), configs)  # they say which of the large files are needed
    patterns = (
        ["params/**"]
        if is_native(path)
        else [weights.replace(".", "*.", 1) for weights in layout(path).weights]
    )
    for pattern in patterns:
        _download(str(name), [pattern])
        if any(path.glob(pattern)):
            break
    return path


def _download(name: str, patterns: list[str]) -> Path:
    """Files of a model on the hub, in the hub's cache."""
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"there is no directory {name}; to look for it on the hub, install stree-jax[hub]"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # offline, unknown, gated: the library raises many kinds
        raise ValueError(
            f"there is no directory {name}, and the hub's copy cannot be had: {first_line(error)}"
        ) from error
