"""PyTorch's zip format (`pytorch_model.bin`), read without torch and without running anything.

Such a file is an uncompressed zip archive: a pickle that names tensors and their storages, and one
record of raw bytes a storage. The unpickler below knows the few names that a state dict needs and
refuses all others, so that a pickle can describe tensors and nothing else. Bytes are mapped, not
read, until a tensor is asked for.
"""

import io
import math
import mmap
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stree_jax.convert.tensors import Tensor

_MAX_PICKLE = 64 << 20  # bytes; the pickle of a 100 000-tensor state dict is about 20 MB
_LOCAL_HEADER = 30  # bytes of a zip record's local header before its name and extra field

_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


def open_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict saved by `torch.save` of torch 1.6 or later.

    Raises:
        ValueError: the file is not of this format, is truncated, or holds anything but tensors.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise ValueError(
                    f"{path} is not a zip archive: files of torch before 1.6 are not read;"
                    " load it with torch and save it as safetensors"
                )
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        archive = _Archive(path, data)
        state = _Unpickler(archive).load()
    except ValueError:
        raise
    except Exception as error:  # whatever a damaged zip or pickle makes the libraries raise
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a state dict")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} is not a state dict: entry {str(name)[:80]!r} is a {type(value).__name__}"
            )
    return dict(state)


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str
    size: int  # elements


class _Archive:
    """The records of the file by name, as ranges of bytes."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.records: dict[str, tuple[int, int]] = {}
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.partition("/")[2]  # below the archive's one directory
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise ValueError(f"{path}: record {name!r} is compressed or encrypted")
                if name in self.records:
                    raise ValueError(f"{path}: record {name!r} occurs twice")
                self.records[name] = (self._start(info), info.file_size)
        if self.bytes_of("byteorder", default=b"little") != b"little":
            raise ValueError(f"{path} was saved on a big-endian machine, which is not supported")

    def bytes_of(self, name: str, default: bytes | None = None) -> bytes:
        """A whole small record."""
        if name not in self.records:
            if default is not None:
                return default
            raise ValueError(f"{self.path} has no record {name!r}; it was not saved by torch")
        start, size = self.records[name]
        if size > _MAX_PICKLE:
            raise ValueError(f"{self.path}: record {name!r} has {size} bytes, too many to be real")
        return self.data[start : start + size]

    def tensor(self, storage: _Storage, offset: int, shape: tuple, strides: tuple) -> Tensor:
        """A view of a storage, with every number checked against the record's size."""
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise ValueError(f"{self.path}: a tensor with shape {shape} and strides {strides}")
        start, size = self.records.get(f"data/{storage.key}", (0, -1))
        if size != storage.size * storage.dtype.itemsize:
            raise ValueError(
                f"{self.path}: storage {storage.key!r} should have {storage.size} numbers of type"
                f" {storage.dtype}, its record has {max(size, 0)} bytes"
            )
        count = math.prod(shape)
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        # Real weights never repeat an element; a small file must not describe a huge tensor.
        if count and (last >= storage.size or count > storage.size):
            raise ValueError(f"{self.path}: a tensor of shape {shape} is larger than its storage")

        def read() -> np.ndarray:
            if not count:
                return np.zeros(shape, storage.dtype)
            flat = np.frombuffer(self.data, storage.dtype, storage.size, start)
            return np.lib.stride_tricks.as_strided(
                flat[offset:],
                shape,
                [stride * storage.dtype.itemsize for stride in strides],
                writeable=False,
            )

        return Tensor(tuple(shape), storage.dtype, read)

    def _start(self, info: zipfile.ZipInfo) -> int:
        header = self.data[info.header_offset : info.header_offset + _LOCAL_HEADER]
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise ValueError(f"{self.path} is damaged: a record's header is missing")
        name_size = int.from_bytes(header[26:28], "little")
        extra_size = int.from_bytes(header[28:30], "little")
        start = info.header_offset + _LOCAL_HEADER + name_size + extra_size
        if start + info.file_size > len(self.data):
            raise ValueError(f"{self.path} is truncated: record {info.filename!r} ends outside it")
        return start


class _StorageType(NamedTuple):
    """What a storage class's name stands for; not callable, so a pickle cannot make one."""

    dtype: np.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: _Archive):
        super().__init__(io.BytesIO(archive.bytes_of("data.pkl")))
        self._archive = archive

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch._utils", "_rebuild_tensor_v2":
                return self._rebuild_tensor
            case "torch._utils", "_rebuild_parameter":
                return _rebuild_parameter
            case "torch" | "torch.storage", _ if name in _STORAGES:
                return _StorageType(_STORAGES[name])
        raise ValueError(
            f"{self._archive.path} is refused: its pickle asks for {module}.{name}, which no state"
            " dict of plain tensors needs"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _StorageType(dtype), str(key), _, int(size)) if size >= 0:
                return _Storage(dtype, key, size)
        raise ValueError(f"{self._archive.path}: an unknown kind of storage: {str(pid)[:80]}")

    def _rebuild_tensor(
        self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any
    ) -> Tensor:
        if not (
            isinstance(storage, _Storage)
            and isinstance(shape, tuple)
            and isinstance(strides, tuple)
        ):
            raise ValueError(f"{self._archive.path}: a tensor without a storage")
        return self._archive.tensor(storage, offset, shape, strides)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data
