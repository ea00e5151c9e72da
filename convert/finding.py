"""Finding a checkpoint or an adapter, here or on the hub, and the files that go along with it."""

import os
import re
from pathlib import Path
from typing import Any

from stree_jax.checkpoint import is_native
from stree_jax.checkpoint.arrays import CHECKSUMS
from stree_jax.checkpoint.directories import recover
from stree_jax.checkpoint.files import (
    CHAT_TEMPLATES,
    checked_path,
    folder_of,
    has_directory,
    has_file,
)
from stree_jax.convert.adapter import ADAPTER
from stree_jax.convert.families import config_files, layout
from stree_jax.convert.files import HEAD, shards
from stree_jax.heads import FOLDER
from stree_jax.messages import first_line, needs, shown_path

# Files that are copied unchanged, as patterns.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "tokenizer.model.v3"),
    "generation_config.json",
    *CHAT_TEMPLATES,
)


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
        if has_directory(path) or folder_of(path) != path:
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
        patterns = shards(path, weights)
        _download(str(name), patterns)
        if any(file.name != HEAD for pattern in patterns for file in path.glob(pattern)):
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
