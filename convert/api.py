"""`convert`: from any known checkpoint to a native one or to another program's format."""

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from stree_jax.checkpoint import is_native, write_checkpoint
from stree_jax.checkpoint.arrays import CHECKSUMS
from stree_jax.checkpoint.directories import new_directory, recover
from stree_jax.checkpoint.files import (
    CHAT_TEMPLATES,
    checked_path,
    folder_of,
    has_directory,
    has_file,
)
from stree_jax.checkpoint.load import load_native
from stree_jax.convert.adapter import ADAPTER
from stree_jax.convert.families import config_files, layout
from stree_jax.convert.files import HEAD, shards
from stree_jax.convert.reading import ProgressCallback, is_foreign, load_model, open_checkpoint
from stree_jax.convert.writing import writable, write_as, written_as
from stree_jax.heads import FOLDER, load_native_head, open_head, part_of, save_head
from stree_jax.messages import first_line, needs, shown_path
from stree_jax.models.config import ModelConfig
from stree_jax.models.matrices import check_quantize, quantized_names

# Files that are copied unchanged, as patterns.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "tokenizer.model.v3"),
    "generation_config.json",
    *CHAT_TEMPLATES,
)


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
        quantize: "int8" for matrices in 8 bits, natively only; see `from_pretrained`.
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
    in_8_bits: dict[str, Any] = dict(quantize=quantize, keep=keep)
    target = checked_path(destination, "destination", "the directory to create")
    path = find(source)
    if target.exists():
        raise ValueError(f"{target} exists; choose another name")
    changes = None if adapter is None else find(adapter, adapter=True)
    files = side_files(path)
    if not is_foreign(path, quirks, ignore, changes):
        model = load_native(path, dtype=dtype, **in_8_bits)
        if to != "native" and quantized_names(model):
            raise ValueError(
                f"{path} has matrices in 8 bits, which are stored natively only; convert the"
                " original"
            )
        inside = path / FOLDER
        found = open_head(FOLDER, inside)[1] if inside.is_dir() else None
        left_out = _left_out(found, model.config, to, model.dtype.name, target)
        has_place = found is not None and left_out is None
        try:
            head = load_native_head(FOLDER, inside, model) if has_place else None
        except ValueError as error:
            if quantize is None:
                raise
            head, left_out = None, str(error)  # of before heads knew their target in 8 bits
    else:
        checkpoint = open_checkpoint(path, quirks, ignore, changes)
        described, name = checkpoint.description, checkpoint.dtype.name
        if to != "native":  # refuse before reading weights
            written_as(described.config, to, name, target)
        found = None if described.mtp is None else described.mtp.config
        left_out = None if described.mtp is None else described.mtp.problem
        left_out = left_out or _left_out(found, described.config, to, name, target)
        dtype = checkpoint.dtype if dtype is None else dtype
        model = load_model(checkpoint, dtype=dtype, progress=progress, **in_8_bits)
        head = None
        if found is not None and left_out is None:
            head = part_of(FOLDER, "conversion").of_checkpoint(checkpoint, model)

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


def _left_out(head: Any, config: ModelConfig, to: str, dtype: str, target: Path) -> str | None:
    """Says why a format has no place for a head; None: it has."""
    if head is None or to == "native":
        return None
    try:
        written_as(config, to, dtype, target, head)
    except ValueError as error:
        return str(error)
    return None


def side_files(directory: Path) -> list[Path]:
    """Files of a checkpoint that are copied unchanged, such as its tokenizer.

    Only regular files inside the directory: a link to somewhere else could bring any file of this
    machine into a checkpoint that is then published. In the hub's cache all files are links to its
    folder of blobs.
    """
    directory = folder_of(directory)
    inside = [directory.resolve()]
    if directory.resolve().parent.name == "snapshots":
        inside.append(directory.resolve().parents[1] / "blobs")
    return [
        file
        for pattern in _COPIED
        for file in sorted(directory.glob(pattern))
        if any(file.resolve().is_relative_to(folder) for folder in inside)
        if file.is_file() and has_file(file)
    ]


def find(name: str | os.PathLike[str] | Any, *, adapter: bool = False) -> Path:
    """The directory or GGUF file of a checkpoint, or the directory of an adapter.

    It is downloaded from the hub if it is not here.

    Raises:
        ValueError: no path, or there is no such directory and no such model on the hub.
    """
    what = "adapter" if adapter else "path"
    path = checked_path(name, what, "a directory or the name of a model on the hub")
    try:
        recover(path)
        if has_directory(path):
            return path
        if folder_of(path) != path:
            return path
        if path.exists():
            raise ValueError(
                f"{path} is a file; a checkpoint is a directory, such as {path.absolute().parent}"
            )
    except OSError as error:  # for example, a name that is too long
        raise ValueError(f"no checkpoint at {shown_path(path)}: {error.strerror}") from None
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name), re.ASCII):
        raise ValueError(f"no checkpoint at {shown_path(path)}: there is no such directory")
    if adapter:
        return _download(str(name), [ADAPTER, "adapter_model*"])
    # The small files first: they decide which large ones are needed.
    path = _download(str(name), [*_COPIED, *config_files(), CHECKSUMS, "*.index.json"])
    if is_native(path):
        return _download(str(name), ["params/**", f"{FOLDER}/**"])
    for weights in layout(path).weights:
        wanted = shards(path, weights)
        _download(str(name), wanted)
        if any(match.name != HEAD for each in wanted for match in path.glob(each)):
            break
    return path


def _download(name: str, patterns: list[str]) -> Path:
    """Downloads files of a model into the hub's cache and returns their directory."""
    try:
        import huggingface_hub
    except ImportError:
        hub = needs("a name on the hub", "huggingface-hub", "hub")
        raise ValueError(f"there is no directory {name}; {hub}") from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # offline, unknown, gated: the library raises many types
        raise ValueError(
            f"there is no directory {name}, and it cannot be downloaded from the hub:"
            f" {first_line(error)}"
        ) from error
