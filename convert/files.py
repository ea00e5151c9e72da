"""The tensors of a checkpoint directory by name, opened lazily."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # registers bfloat16 with numpy
import numpy as np

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.checkpoint.files import has_file, read_json
from stree_jax.convert.torch_file import MAX_TENSORS, open_torch_file
from stree_jax.messages import first_line

HEAD = "mtp.safetensors"  # a multi-token prediction head beside the other files

_MAX_HEADER = 32 << 20  # bytes of a safetensors header; 100,000 tensors take 15 MB

# Types of safetensors. Its reader gives NumPy no float8.
_FLOAT8 = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}
_SAFETENSORS = _FLOAT8 | {
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
    """Opens the first of these files that is there, or its index: its name and tensors."""
    for name in names:
        file, index = directory / name, directory / f"{name}.index.json"
        has_whole, has_index = has_file(file), has_file(index)
        if has_whole and has_index:
            raise ValueError(
                f"{directory} has both {name} and {index.name}; remove the one that is out of date"
            )
        if has_whole:
            return name, _with_head(directory, _open_file(file))
        if has_index:
            return index.name, _open_sharded(index)
    raise ValueError(
        f"{directory} has no weights: none of {', '.join(names)}, whole or sharded with an index"
    )


def _open_file(path: Path) -> dict[str, Tensor]:
    tensors = open_torch_file(path) if path.suffix == ".bin" else _open_safetensors(path)
    if not tensors:
        raise ValueError(f"{path} has no tensors")
    return tensors


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
        if _MAX_HEADER < size < path.stat().st_size:
            raise ValueError(f"{path} has a header of {size} bytes, too many to be real")
        file = safe_open(path, framework="np")
        tensors, header = {}, None
        names = file.keys()
        if len(names) > MAX_TENSORS:
            raise ValueError(f"{path} has {len(names)} tensors, more than {MAX_TENSORS}")
        for name in names:
            part = file.get_slice(name)
            kind, shape = part.get_dtype(), tuple(part.get_shape())
            if kind not in _SAFETENSORS:
                raise ValueError(
                    f"{path}: tensor {name!r:.80} is stored as {kind}, which is not read; use the"
                    " bfloat16 original"
                )
            read = functools.partial(file.get_tensor, name)
            if kind in _FLOAT8:
                header = header or _header(path, size)
                start = 8 + size + header[name]["data_offsets"][0]
                read = functools.partial(_read_bytes, path, start, _FLOAT8[kind], shape)
            tensors[name] = Tensor(shape, _SAFETENSORS[kind], read)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {first_line(error)}") from error
    return tensors


def _header(path: Path, size: int) -> dict[str, Any]:
    """The header of a safetensors file that opened, and so is a good one."""
    with path.open("rb") as file:
        return json.loads(file.read(8 + size)[8:])


def _read_bytes(path: Path, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    return np.fromfile(path, np.uint8, size, offset=start).view(dtype).reshape(shape)


def shards(directory: Path, name: str) -> list[str]:
    """The files of these weights: those of their index, or patterns if there is none."""
    index = directory / f"{name}.index.json"
    files = {*_weight_map(index).values()} if has_file(index) else {name.replace(".", "*.", 1)}
    return sorted({*files, HEAD})


def _weight_map(index: Path) -> Mapping[str, str]:
    """The file of each tensor."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{index} is damaged: it has no weight_map")
    if len(weight_map) > MAX_TENSORS:
        raise ValueError(f"{index} names {len(weight_map)} tensors, more than {MAX_TENSORS}")
    for name in weight_map.values():
        # Only a plain file name in the same directory; no path.
        plain = isinstance(name, str) and 0 < len(name) < 256 and "\0" not in name
        if not plain or Path(name).name != name or "\\" in name:
            raise ValueError(f"{index} names a file {name!r:.80}, which is not a plain file name")
    return weight_map


def _with_head(directory: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of a head's file, which no index of some releases names."""
    file = directory / HEAD
    head = _open_file(file) if has_file(file) else {}
    if again := sorted(head.keys() & tensors.keys()):
        raise ValueError(
            f"{file} has {len(again)} tensors that other files have too, such as {again[0]!r:.80};"
            " remove the file that is out of date"
        )
    return tensors | head


def _open_sharded(index: Path) -> dict[str, Tensor]:
    weight_map = _weight_map(index)
    files: dict[str, dict[str, Tensor]] = {}
    for name in weight_map.values():
        if name not in files:
            if not has_file(index.parent / name):
                raise ValueError(
                    f"{index} names the file {name!r:.80}, which does not exist: get all shards"
                )
            files[name] = _open_file(index.parent / name)
    missing = [key for key, name in weight_map.items() if key not in files[name]]
    if missing:
        raise ValueError(
            f"{index}: {len(missing)} tensors are not in their files: {missing[:3]!s:.200}"
        )
    stray = [
        key
        for name, tensors in files.items()
        for key in tensors
        if weight_map.get(key, name) != name or key not in weight_map
    ]
    if stray:
        raise ValueError(
            f"{index}: {len(stray)} tensors are in files it does not name: {stray[:3]!s:.200}"
        )
    tensors = {key: files[name][key] for key, name in weight_map.items()}
    return tensors if HEAD in files else _with_head(index.parent, tensors)
