"""PyTorch's zip format (`pytorch_model.bin`), read without torch and without running code.

Such a file is an uncompressed zip archive: a pickle that describes tensors and their storages, and
one record of raw bytes for each storage. The unpickler below accepts only the opcodes and the few
names that a state dict needs, so a pickle can describe tensors and nothing else. What it builds is
never hashed, compared or printed. Bytes are memory-mapped until a tensor is read.
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

_MAX_PICKLE = 32 << 20  # bytes; 100,000 tensors take about 20 MB
_MAX_AXES = 8
_LOCAL_HEADER = 30  # bytes of a zip record's local header, without name and extra field

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
        ValueError: the file is not in this format, is damaged, or holds anything but tensors.
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
    except Exception as error:  # the libraries raise anything on a damaged zip or pickle
        raise ValueError(
            f"{path} is damaged: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a state dict")
    for name, value in state.items():  # names are strings; the unpickler checks that
        if isinstance(value, dict):
            raise ValueError(
                f"{path} is not a state dict but has one as its entry {name[:80]!r}, perhaps: a"
                " training checkpoint? Save that entry alone"
            )
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{path} is not a state dict: entry {name[:80]!r} is a {type(value).__name__}"
            )
    return dict(state)


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str
    size: int  # elements


class _Archive:
    """The records of a file by name, as ranges of bytes."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.records: dict[str, tuple[int, int]] = {}
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.partition("/")[2]  # without the archive's directory
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise ValueError(f"{path}: record {name!r} is compressed or encrypted")
                if name in self.records:
                    raise ValueError(f"{path}: record {name!r} occurs twice")
                self.records[name] = (self._start(info), info.file_size)
        if self.bytes_of("byteorder", default=b"little") != b"little":
            raise ValueError(f"{path} was saved on a big-endian machine, which is not supported")

    def bytes_of(self, name: str, default: bytes | None = None) -> bytes:
        """The content of a small record."""
        if name not in self.records:
            if default is not None:
                return default
            raise ValueError(f"{self.path} has no record {name!r}; it was not saved by torch")
        start, size = self.records[name]
        if size > _MAX_PICKLE:
            raise ValueError(f"{self.path}: record {name!r} has {size} bytes, too many to be real")
        return self.data[start : start + size]

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
        """A view of a storage, checked against the size of its record."""
        if not isinstance(storage, _Storage):
            raise ValueError(f"{self.path}: a tensor without a storage")
        if not (
            isinstance(shape, tuple)
            and isinstance(strides, tuple)
            and len(shape) == len(strides) <= _MAX_AXES
            and all(
                isinstance(number, int) and 0 <= number < 1 << 63
                for number in (offset, *shape, *strides)
            )
        ):
            raise ValueError(f"{self.path}: a tensor whose shape, strides or offset make no sense")
        start, size = self.records.get(f"data/{storage.key}", (0, -1))
        if size != storage.size * storage.dtype.itemsize:
            raise ValueError(
                f"{self.path}: storage {storage.key[:80]!r} should have {storage.size} numbers of"
                f" type {storage.dtype}, its record has {max(size, 0)} bytes"
            )
        count = math.prod(shape)
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        # Weights never repeat an element, so a small file cannot describe a huge tensor.
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

        return Tensor(shape, storage.dtype, read)

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


class _Name(NamedTuple):
    """Stands for a global of the pickle. Not callable; `load_reduce` interprets it."""

    kind: str
    dtype: np.dtype | None = None


_NAMES = {
    ("collections", "OrderedDict"): _Name("dict"),
    ("torch._utils", "_rebuild_tensor_v2"): _Name("tensor"),
    ("torch._utils", "_rebuild_parameter"): _Name("parameter"),
    # Has attributes such as mamba_ssm's _no_weight_decay, which are ignored.
    ("torch._utils", "_rebuild_parameter_with_state"): _Name("parameter"),
}

# All opcodes that `torch.save` uses for a state dict (protocol 2).
_OPCODES = (
    "PROTO STOP MARK EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS"
    " BINUNICODE BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE"
    " BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL REDUCE BUILD BINPERSID"
)


_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    """Python's unpickler, restricted to a few opcodes, with checks on what they build.

    The one in C is not used: it allocates its memo by the largest index in the file.
    """

    def __init__(self, archive: _Archive):
        super().__init__(io.BytesIO(archive.bytes_of("data.pkl")))
        self._archive = archive

    def find_class(self, module: str, name: str) -> _Name:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _Name("storage", _STORAGES[name])
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            raise ValueError(
                f"{self._archive.path} holds tensors of a type such as float8; quantised"
                " checkpoints are not supported, use the bfloat16 original"
            )
        raise ValueError(
            f"{self._archive.path} is refused: its pickle asks for {module[:80]}.{name[:80]}, which"
            " no state dict of plain tensors needs"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Name("storage", np.dtype() as dtype), str(key), _, int(size)) if (
                size >= 0
            ):
                return _Storage(dtype, key, size)
        raise ValueError(f"{self._archive.path}: an unknown kind of storage")

    def load_reduce(self) -> None:
        """Builds a tensor or an empty dict."""
        arguments, function = self.stack.pop(), self.stack[-1]
        kind = function.kind if isinstance(function, _Name) else None
        match kind, arguments:
            case "dict", ():
                self.stack[-1] = OrderedDict()
            case "tensor", (storage, offset, shape, strides, *_):
                self.stack[-1] = self._archive.tensor(storage, offset, shape, strides)
            case "parameter", (Tensor() as data, *_):
                self.stack[-1] = data
            case _:
                raise ValueError(f"{self._archive.path}: a call that builds no tensor")

    def load_build(self) -> None:
        """Drops attributes of a dict, such as a state dict's `_metadata`."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise ValueError(f"{self._archive.path}: attributes of something that has none")

    def load_setitem(self) -> None:
        """One entry of a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def load_setitems(self) -> None:
        """Entries of a dict."""
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        # Only strings: hashing a deeply nested tuple can take forever or overflow the stack.
        if not (isinstance(self.stack[-1], dict) and isinstance(key, str)):
            raise ValueError(f"{self._archive.path}: not a dict with names as keys")
        self.stack[-1][key] = value

    def _refuse(self) -> None:
        raise ValueError(f"{self._archive.path}: its pickle has opcodes that no state dict needs")

    dispatch = dict.fromkeys(range(256), _refuse) | {
        getattr(pickle, name)[0]: _PythonUnpickler.dispatch[getattr(pickle, name)[0]]
        for name in _OPCODES.split()
    }
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
