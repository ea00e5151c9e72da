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
import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)
import numpy as np

from stree_jax.files import has_file

CHECKSUMS = "checksums.json"
# Zeros compress well, but weights do not.
_MOST_COMPRESSED = 1000


@dataclasses.dataclass(frozen=True)  # a leaf of pytrees; a NamedTuple would be a node
class Tensor:
    """An array in a file, read on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]  # may return a read-only view of the file


def write_checksums(path: Path, weights: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Writes the CRC-32 of each array and the sizes of the data files."""
    crcs = {name: zlib.crc32(_bytes(np.asarray(weight))) for name, weight in weights.items()}
    files = sorted((path / "params").rglob("d/*"))
    sizes = {str(file.relative_to(path / "params")): file.stat().st_size for file in files}
    (path / CHECKSUMS).write_text(json.dumps({"crc32": crcs, "sizes": sizes}, indent=2) + "\n")


def check_sizes(params: Path, sizes: Mapping[str, int]) -> None:
    """Compares the sizes of files with those that were saved.

    Raises:
        ValueError: a file has another size.
    """
    for name, size in sizes.items():
        file = params / name
        if has_file(file) and file.stat().st_size != size:
            raise ValueError(f"{name:.80} has {file.stat().st_size} bytes, not {size!r:.20}")


def check_crc(values: np.ndarray, crc: int | None) -> None:
    """Compares an array with its saved checksum; None skips the check.

    Raises:
        ValueError: the checksum differs.
    """
    if crc is not None and zlib.crc32(_bytes(values)) != crc:
        raise ValueError("it has another checksum than when it was saved")


def open_arrays(params: Path, metadata: Mapping[str, Any]) -> dict[str, Tensor]:
    """Opens the arrays below `params` by dotted name. Their `read` raises what tensorstore raises.

    Args:
        params: Orbax's directory.
        metadata: the content of its file state/_METADATA.

    Raises:
        ValueError: the arrays are larger than the files can hold.
        Exception: anything else that tensorstore raises about damaged files.
    """
    import tensorstore as ts

    state = params.resolve() / "state"  # tensorstore refuses ".."
    context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 20}})
    opened = {}
    for entry in metadata["tree_metadata"].values():
        name = ".".join(str(key["key"]) for key in entry["key_metadata"])
        files: dict[str, Any] = {"driver": "file", "path": f"{state}/"}
        store = (
            {"driver": "ocdbt", "base": files, "path": f"{name}/"}
            if metadata.get("use_ocdbt", True)
            else files | {"path": f"{state}/{name}/"}
        )
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        opened[name] = ts.open(
            {"driver": driver, "kvstore": store}, open=True, read=True, context=context
        )
    arrays = {name: _tensor(future.result()) for name, future in opened.items()}
    size = sum(file.stat().st_size for file in params.rglob("*") if file.is_file())
    wanted = sum(int(np.prod(array.shape, dtype=object)) for array in arrays.values())
    if wanted > size * _MOST_COMPRESSED:
        raise ValueError(f"its arrays have {wanted} numbers, its files only {size} bytes")
    return arrays


def _tensor(store: Any) -> Tensor:
    dtype = np.dtype(store.dtype.numpy_dtype)
    return Tensor(tuple(store.shape), dtype, functools.partial(_read, store))


def _read(store: Any) -> np.ndarray:
    return store.read().result()


def _bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
