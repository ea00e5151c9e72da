"""The tensors of a checkpoint directory, by name, none of them read before it is asked for."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # registers bfloat16 with numpy
import numpy as np

from stree_jax.checkpoint import read_json


class Tensor(NamedTuple):
    """A tensor that was not read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]  # may be a view of the file; not to be written to


_SAFETENSORS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def open_tensors(directory: Path, names: Sequence[str]) -> tuple[str, dict[str, Tensor]]:
    """The file (or index) that holds the weights of a checkpoint, and its tensors.

    Args:
        directory: the checkpoint.
        names: files that may hold all weights, the best first; each may be sharded instead.

    Raises:
        ValueError: there is none, or it is damaged, or it is of a kind that is refused.
    """
    for name in names:
        file, index = directory / name, directory / f"{name}.index.json"
        if file.is_file() and index.is_file():
            raise ValueError(
                f"{directory} has both {name} and {index.name}; remove the one that is out of date"
            )
        if file.is_file():
            return name, _open_file(file)
        if index.is_file():
            return index.name, _open_sharded(index)
    raise ValueError(f"{directory} has no weights: none of {', '.join(names)}, whole or sharded")


def _open_file(path: Path) -> dict[str, Tensor]:
    from stree_jax.convert.torch_file import open_torch_file

    return open_torch_file(path) if path.suffix == ".bin" else _open_safetensors(path)


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="np")
        tensors = {}
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            part = file.get_slice(name)
            if part.get_dtype() not in _SAFETENSORS:
                raise ValueError(
                    f"{path}: tensor {name} is stored as {part.get_dtype()}; quantised checkpoints"
                    " are not supported, use the bfloat16 original"
                )
            tensors[name] = Tensor(
                tuple(part.get_shape()),
                _SAFETENSORS[part.get_dtype()],
                functools.partial(file.get_tensor, name),
            )
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return tensors


def _open_sharded(index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{index} is damaged: it has no weight_map")
    files: dict[str, dict[str, Tensor]] = {}
    for name in weight_map.values():
        # A plain file name beside the index: nothing above it, nothing elsewhere.
        plain = isinstance(name, str) and len(name) < 256 and "\0" not in name
        if not plain or Path(name).name != name or "\\" in name:
            raise ValueError(f"{index} names a file {name!r:.80}, which is not a plain file name")
        if name not in files:
            if not (index.parent / name).is_file():
                raise ValueError(f"{index} names the file {name!r}, which does not exist")
            files[name] = _open_file(index.parent / name)
    missing = [key for key, name in weight_map.items() if key not in files[name]]
    if missing:
        raise ValueError(f"{index}: {len(missing)} tensors are not in their files: {missing[:3]}")
    stray = [
        key
        for name, tensors in files.items()
        for key in tensors
        if weight_map.get(key, name) != name or key not in weight_map
    ]
    if stray:
        raise ValueError(f"{index}: {len(stray)} tensors are in files it does not say: {stray[:3]}")
    return {key: files[name][key] for key, name in weight_map.items()}
