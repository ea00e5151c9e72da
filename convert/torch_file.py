"""PyTorch's zip format (`pytorch_model.bin`), read without torch and without running code.

Such a file is an uncompressed zip archive: a pickle that describes tensors and their storages, and
one record of raw bytes for each storage. The unpickler below accepts only the opcodes and the few
names that a state dict needs, so a pickle can describe tensors and nothing else. What it builds is
never hashed, compared or printed, and its size is bounded. Bytes are memory-mapped until a tensor
is read; the first read of a record verifies its CRC.
"""

import io
import math
import mmap
import pickle
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.messages import first_line

# A state dict of 100,000 tensors has a zip directory of 8 MB, and a pickle of 14 MB, 4.2 million
# opcodes and 1.1 million memo entries, which takes items off the stack after 2,000 at the latest.
_MAX_DIRECTORY = 12 << 20  # bytes
_MAX_PICKLE = 32 << 20  # bytes
_MAX_OPCODES = 4_500_000
_MAX_MEMO = 1_200_000
_MAX_STACK = 10_000
_MAX_MARKS = 64
_MAX_AXES = 8
MAX_TENSORS = 1 << 18  # in a checkpoint; the largest published ones have about 100,000
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
    """The tensors of a state dict saved by `torch.save` of torch 1.6 or later."""
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
    except Exception as error:  # the libraries raise anything on a damaged zip or pickle
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(
            f"{path} is damaged: {type(error).__name__}: {first_line(error)}"
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
        self.num_tensors = 0
        self._unverified: dict[str, int] = {}  # CRCs of records that have not been read
        with _Bounded(path) as file, zipfile.ZipFile(file) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
            ends = [info.header_offset for info in infos[1:]] + [archive.start_dir]
        if not infos:
            raise ValueError(f"{path} has no records; it was not saved by torch")
        # torch writes 0 for all of them if told to compute none (`set_crc32_options`).
        has_crcs = any(info.CRC for info in infos)
        for info, end in zip(infos, ends, strict=True):
            name = info.filename.partition("/")[2]  # without the archive's directory
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise ValueError(f"{path}: record {name!r:.80} is compressed or encrypted")
            if name in self.records:
                raise ValueError(f"{path}: record {name!r:.80} occurs twice")
            self.records[name] = (self._start(info, end), info.file_size)
            if has_crcs:
                self._unverified[name] = info.CRC
        if self.bytes_of("byteorder", default=b"little") != b"little":
            raise ValueError(f"{path} was saved on a big-endian machine, which is not supported")

    def bytes_of(self, name: str, default: bytes | None = None) -> bytes:
        """The content of a small record."""
        if name not in self.records:
            if default is not None:
                return default
            raise ValueError(f"{self.path} has no record {name!r:.80}; it was not saved by torch")
        size = self.records[name][1]
        if size > _MAX_PICKLE:
            raise ValueError(f"{self.path}: record {name!r} has {size} bytes, too many to be real")
        return bytes(self.verified(name))

    def verified(self, name: str) -> memoryview:
        """The bytes of a record, whose CRC is checked on first use."""
        start, size = self.records[name]
        data = memoryview(self.data)[start : start + size]
        crc = self._unverified.pop(name, None)
        if crc is not None and zlib.crc32(data) != crc:
            self._unverified[name] = crc
            raise ValueError(f"{self.path} is damaged: record {name!r:.80} has another CRC")
        return data

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
        """A view of a storage, checked against the size of its record."""
        if not isinstance(storage, _Storage):
            raise ValueError(f"{self.path}: a tensor without a storage")
        self.num_tensors += 1
        if self.num_tensors > MAX_TENSORS:
            raise ValueError(f"{self.path} has more than {MAX_TENSORS} tensors")
        if not (
            isinstance(shape, tuple)
            and isinstance(strides, tuple)
            and len(shape) == len(strides) <= _MAX_AXES
            and all(
                type(number) is int and 0 <= number < 1 << 63
                for number in (offset, *shape, *strides)
            )
        ):
            raise ValueError(f"{self.path}: a tensor whose shape, strides or offset make no sense")
        record = f"data/{storage.key}"
        _, size = self.records.get(record, (0, -1))
        if size != storage.size * storage.dtype.itemsize:
            raise ValueError(
                f"{self.path}: storage {storage.key[:80]!r} should have {storage.size} numbers of"
                f" type {storage.dtype}, its record has {max(size, 0)} bytes"
            )
        count = math.prod(shape)
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        # Weights never repeat an element, so a small file cannot describe a huge tensor.
        if count and (last >= storage.size or count > storage.size):
            raise ValueError(
                f"{self.path}: a tensor of shape {shape!s:.80} is larger than its storage"
            )

        if _repeats(shape, strides):
            raise ValueError(f"{self.path}: a tensor shows elements of its storage twice")

        def read() -> np.ndarray:
            if not count:
                return np.zeros(shape, storage.dtype)
            flat = np.frombuffer(self.verified(record), storage.dtype)
            return np.lib.stride_tricks.as_strided(
                flat[offset:],
                shape,
                [stride * storage.dtype.itemsize for stride in strides],
                writeable=False,
            )

        return Tensor(shape, storage.dtype, read)

    def _start(self, info: zipfile.ZipInfo, end: int) -> int:
        """The offset of a record's data.

        Only the record's local header has its own length. Everything else comes from the directory
        and must agree: the name, and that the data ends at the next record.
        """
        header = self.data[info.header_offset : info.header_offset + _LOCAL_HEADER]
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise ValueError(f"{self.path} is damaged: a record's header is missing")
        flags, method = header[6:8], header[8:10]
        name_size = int.from_bytes(header[26:28], "little")
        extra_size = int.from_bytes(header[28:30], "little")
        name_start = info.header_offset + _LOCAL_HEADER
        name = self.data[name_start : name_start + name_size]
        start = name_start + name_size + extra_size
        # After the data its CRC and size may be repeated, in one of four forms.
        repeated = (12, 16, 20, 24) if info.flag_bits & 8 else (0,)
        if (
            name != info.orig_filename.encode("utf-8" if info.flag_bits & 1 << 11 else "cp437")
            or flags != info.flag_bits.to_bytes(2, "little")
            or method != info.compress_type.to_bytes(2, "little")
            or info.compress_size != info.file_size
            or end - start - info.file_size not in repeated
        ):
            raise ValueError(
                f"{self.path} is damaged: the header of record {info.filename!r:.80} disagrees with"
                " the directory"
            )
        return start


def _repeats(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if a view has a stride of 0 or shows an element twice."""
    reach = 0
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if stride == 0 or (n > 1 and stride <= reach):
            return True
        reach += max(n - 1, 0) * stride
    return False


class _Bounded(io.FileIO):
    """A file from which zipfile cannot read a directory of more than `_MAX_DIRECTORY` bytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY:
            raise ValueError(f"{self.name} has a zip directory of {size} bytes, too many")
        return super().read(size)


class _Name(NamedTuple):
    """Stands for a global of the pickle. Not callable; `load_reduce` interprets it."""

    kind: str
    dtype: np.dtype | None = None


_NAMES = {
    ("collections", "OrderedDict"): _Name("dict"),
    ("torch._utils", "_rebuild_tensor_v2"): _Name("tensor"),
    ("torch._utils", "_rebuild_parameter"): _Name("parameter"),
    # Its attributes, such as mamba_ssm's _no_weight_decay, are ignored.
    ("torch._utils", "_rebuild_parameter_with_state"): _Name("parameter"),
}

# All opcodes that `torch.save` uses for a state dict (protocol 2).
_OPCODES = (
    "PROTO STOP MARK EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS"
    " BINUNICODE BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE"
    " BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL REDUCE BUILD BINPERSID"
)


_PythonUnpickler: Any = pickle._Unpickler


class _BoundedDispatch:
    """Looks up an unpickler's next opcode, unless its result is too large to be real."""

    def __init__(self, unpickler: "_Unpickler"):
        self._unpickler = unpickler
        self._num_opcodes = 0

    def __getitem__(self, opcode: int) -> Any:
        at = self._unpickler
        self._num_opcodes += 1
        if (
            self._num_opcodes > _MAX_OPCODES
            or len(at.memo) > _MAX_MEMO
            or len(at.stack) > _MAX_STACK
            or len(at.metastack) > _MAX_MARKS
        ):
            raise ValueError(
                f"{at.path} is damaged: its pickle is larger than that of any state dict"
            )
        return _Unpickler.dispatch[opcode]


class _Unpickler(_PythonUnpickler):
    """Python's unpickler, restricted to a few opcodes, with checks on their results.

    The one in C is not used: it allocates its memo by the largest index in the file.
    """

    def __init__(self, archive: _Archive):
        super().__init__(io.BytesIO(archive.bytes_of("data.pkl")))
        self._archive = archive
        self.path = archive.path
        self.dispatch = _BoundedDispatch(self)

    def find_class(self, module: str, name: str) -> _Name:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _Name("storage", _STORAGES[name])
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            raise ValueError(
                f"{self._archive.path} holds tensors of a type such as float8, which are read from"
                " safetensors only; use the bfloat16 original"
            )
        raise ValueError(
            f"{self._archive.path} is refused: its pickle asks for {module[:80]}.{name[:80]}, which"
            " no state dict of plain tensors needs"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Name("storage", np.dtype() as dtype), str(key), _, int(size)) if (
                type(size) is int and 0 <= size < 1 << 63
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

    dispatch: Any = dict.fromkeys(range(256), _refuse) | {
        getattr(pickle, name)[0]: _PythonUnpickler.dispatch[getattr(pickle, name)[0]]
        for name in _OPCODES.split()
    }
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
