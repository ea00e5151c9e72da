"""`Tensor`, an array in a file; and the arrays of a native checkpoint, read one at a time.

Orbax writes them; tensorstore, on which Orbax is built, reads them here. Orbax's own loader reads
all at once on an event loop that it closes at the first error, so that damaged files leave many
messages on stderr. It does not say which array is damaged either.
"""

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.matmul import KINDS
from stree_jax.checkpoint.directories import plain_path
from stree_jax.checkpoint.files import has_file, read_json
from stree_jax.messages import first_line

CHECKSUMS = "checksums.json"
VALUES, SCALES = ".values", ".scales"  # after the name of a quantised matrix
# Zeros compress well, but weights do not.
_MOST_COMPRESSED = 1000


@dataclasses.dataclass(frozen=True)  # a leaf of pytrees; a NamedTuple would be a node
class Tensor:
    """An array in a file, read on demand; with `scales` a quantised matrix's values.

    Attributes:
        four_bits: reads the int8 values of 4-bit numbers, and the float16 scale of each, which 32
            neighbours in the last axis share; None: the file has others.
        bits: of a number in the file, if they are fewer than 8.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]  # may return a read-only view of the file
    scales: "Tensor | None" = None
    four_bits: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None
    bits: int = 8


def write_checksums(path: Path, weights: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Writes the CRC-32 of each array and the sizes of the data files."""
    crcs = {name: _crc(np.asarray(weight)) for name, weight in weights.items()}
    files = sorted((path / "params").rglob("d/*"))
    sizes = {str(file.relative_to(path / "params")): file.stat().st_size for file in files}
    (path / CHECKSUMS).write_text(json.dumps({"crc32": crcs, "sizes": sizes}, indent=2) + "\n")


def check_written(path: Path) -> None:
    """Reads a new checkpoint's arrays; OSError: they are not what was written."""
    try:
        for tensor in open_arrays(path).values():
            tensor.read()
            if tensor.scales is not None:
                tensor.scales.read()
    except Exception as error:
        raise OSError(f"weights were not written as they are: {first_line(error)}") from error


def open_arrays(path: Path) -> dict[str, Tensor]:
    """Opens the arrays of a checkpoint by dotted name; ValueError: they are damaged."""
    params = path / "params"
    if not params.is_dir():
        raise ValueError(f"{path} has no weights: the directory 'params' is missing")
    sums = read_json(path / CHECKSUMS) if has_file(path / CHECKSUMS) else None
    metadata = params / "state" / "_METADATA"
    has_file(metadata)  # says what lies there instead
    try:
        for name, size in ({} if sums is None else sums.get("sizes", {})).items():
            file = params / name
            if has_file(file) and file.stat().st_size != size:
                raise ValueError(f"{name:.80} has {file.stat().st_size} bytes, not {size!r:.20}")
        stores = _open_stores(params, read_json(metadata))
    except Exception as error:
        raise ValueError(
            f"{path} is damaged: cannot read its weights ({first_line(error)})"
        ) from error
    crcs = dict.fromkeys(stores) if sums is None else sums.get("crc32")
    is_crc = type(None) if sums is None else int
    if not (
        isinstance(crcs, dict)
        and crcs.keys() == stores.keys()
        and all(type(crc) is is_crc for crc in crcs.values())
    ):
        raise ValueError(f"{path / CHECKSUMS} is damaged: it is not about the weights here")
    tensors = {}
    for name, store in stores.items():
        read = functools.partial(_read, store, crcs[name])
        tensors[name] = Tensor(tuple(store.shape), np.dtype(store.dtype.numpy_dtype), read)
    for name in [name.removesuffix(SCALES) for name in tensors if name.endswith(SCALES)]:
        values, scales = tensors.pop(name + VALUES, None), tensors.pop(name + SCALES)
        if values is None or scales.dtype != KINDS.get(values.dtype.name):
            raise ValueError(f"{path} is damaged: {name:.80} has scales, but no values for them")
        tensors[name] = dataclasses.replace(values, scales=scales)
    return tensors


def _open_stores(params: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The stores of tensorstore, by dotted name."""
    import tensorstore as ts

    state = plain_path(params) / "state"
    context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 20}})
    names = [
        ".".join(str(key["key"]) for key in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
    ]
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}
    opened = {}
    for name in names:
        spec = {"driver": "zarr3", "kvstore": kvstore | {"path": f"{name}/"}}
        opened[name] = ts.open(spec, open=True, read=True, context=context)
    stores = {name: future.result() for name, future in opened.items()}
    size = sum(file.stat().st_size for file in params.rglob("*") if file.is_file())
    wanted = sum(int(np.prod(store.shape, dtype=object)) for store in stores.values())
    if wanted > size * _MOST_COMPRESSED:
        raise ValueError(f"its arrays have {wanted} numbers, its files only {size} bytes")
    return stores


def _read(store: Any, crc: int | None) -> np.ndarray:
    values = store.read().result()
    if crc is not None and _crc(values) != crc:
        raise ValueError("it has another checksum than when it was saved")
    return values


def _crc(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
