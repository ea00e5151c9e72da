"""GGUF files, of llama.cpp: metadata, and tensors that are read on demand.

Quantised tensors become float32, by the package `gguf`. The header is read here: the package's own
reader has no limits, and takes seconds for the tokens of a real file.
"""

import functools
import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.checkpoint.files import has_file
from stree_jax.checks import check_int, require
from stree_jax.convert.fields import MAX_LAYERS
from stree_jax.convert.torch_file import MAX_TENSORS
from stree_jax.messages import first_line, needs, shown

_MAX_HEADER = 64 << 20  # bytes; 250,000 tokens and their merges take 10 MB
_MAX_FIELDS = 1 << 16
_AT_ONCE = 1 << 24  # that are dequantised at once
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
# Types in metadata.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
# Types of tensors that are no blocks.
_PLAIN: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path is, or the only one of a directory without other weights."""
    if path.suffix == ".gguf":
        return path if has_file(path) else None
    if any(any(path.glob(pattern)) for pattern in ("*.safetensors*", "pytorch_model*")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len({_name(file) for file in files}) > 1:
        names = ", ".join(shown(file.name) for file in files[:4])
        raise ValueError(f"{path} has several GGUF files, {names}: give the path of one")
    return files[0] if files else None


def _name(file: Path) -> str:
    """The name without the number of a part."""
    match = _PART.fullmatch(file.name)
    return match[1] if match else file.name


def open_parts(file: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Opens a file or all parts of it: metadata by key, and tensors by name.

    Long lists, and texts in lists, are left out. The third result says how many tensors are
    quantised, and how.
    """
    match, parts = _PART.fullmatch(file.name), [file]
    if match is not None:
        numbers = range(1, int(match[3]) + 1)
        parts = [file.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in numbers]
    metadata: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    kinds: Counter[str] = Counter()
    for part in parts:
        if not has_file(part):
            raise ValueError(f"{part} does not exist: get all {len(parts)} parts of the file")
        more, of_part = _open_part(part, kinds)
        if again := sorted(tensors.keys() & of_part.keys()):
            raise ValueError(f"{part} has the tensor {shown(again[0])} of an earlier part again")
        metadata, tensors = more | metadata, tensors | of_part
    require(bool(tensors), f"{file} has no tensors")
    blocks = {kind: count for kind, count in kinds.most_common() if kind not in _PLAIN}
    return metadata, tensors, ", ".join(f"{count} tensors {kind}" for kind, count in blocks.items())


def _open_part(file: Path, kinds: Counter[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors of one file, whose types are counted."""
    try:
        import gguf
    except ImportError:
        raise ValueError(needs(f"{file}: reading GGUF files", "gguf", "gguf")) from None
    tensors, end = {}, 0
    try:
        with file.open("rb") as opened:
            header = _Header(opened.read(_MAX_HEADER))
        size = file.stat().st_size
        metadata, places = header.read()
        align = check_int("general.alignment", metadata.get("general.alignment", 32), 1, 1 << 20)
        start = -(-header.at // align) * align
        for name, (shape, number, offset) in places.items():
            kind = _kind(number)
            block, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block:
                raise ValueError(f"{name!r:.80} has shape {shape!s:.80} in blocks of {block}")
            num_bytes = math.prod(shape) // block * bytes_of_block
            if offset != end:  # elsewhere are the numbers of another tensor
                raise ValueError(f"{name!r:.80} is at {offset}, not {end}, behind the one before")
            if start + offset + num_bytes > size:
                raise ValueError(f"{size} bytes are too few for {name!r:.80}; download it again")
            end += -(-num_bytes // align) * align
            place = shape, start + offset, num_bytes
            in_four = functools.partial(_four_bits, file, *place)
            tensors[name] = Tensor(
                shape,
                np.dtype(_PLAIN.get(kind.name, "<f4")),
                functools.partial(_read, file, kind, *place),
                four_bits=in_four if kind.name == "Q4_0" else None,
                bits=min(8, 8 * bytes_of_block // block),
            )
            kinds[kind.name] += 1
    except (struct.error, OverflowError):
        raise ValueError(f"{file} is damaged: its header is cut off, or endless") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {first_line(error)}") from error
    return metadata, tensors


class _Header:
    """The header of a file by its first bytes. Raises struct.error behind their end."""

    def __init__(self, data: bytes):
        self._data, self.at = data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """The metadata by key; shape, type and offset of each tensor by name."""
        require(self._data[:4] == b"GGUF", "it does not begin with GGUF")
        _, version, num_tensors, num_fields = self._take("IIQQ")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}, not 2 or 3 of little-endian machines")
        if num_tensors > MAX_TENSORS or num_fields > _MAX_FIELDS:
            raise ValueError(f"{num_tensors} tensors and {num_fields} fields are too many")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._new(metadata)
            metadata[key] = self._value(*self._take("I"))
        tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._new(tensors)
            (num_axes,) = self._take("I")
            require(num_axes <= 4, f"{name!r:.80} has {num_axes} axes")
            shape = self._take(f"{num_axes}Q")[::-1]
            tensors[name] = (shape, *self._take("IQ"))
        return metadata, tensors

    def _take(self, form: str) -> tuple:
        values = struct.unpack_from(f"<{form}", self._data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def _text(self) -> str:
        (size,) = self._take("Q")
        (text,) = self._take(f"{min(size, _MAX_HEADER)}s")
        return text.decode()

    def _new(self, known: Mapping[str, Any]) -> str:
        name = self._text()
        require(name not in known, f"{name!r:.80} is there twice")
        return name

    def _value(self, kind: int) -> Any:
        """A number, a text or a list of numbers; None for anything else."""
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._take(_form(kind))[0]
        kind, count = self._take("IQ")
        if kind == _TEXT:  # tokens and merges; this loop is most of the time
            at = self.at
            for _ in range(count):
                at += 8 + struct.unpack_from("<Q", self._data, at)[0]
            self.at = at
            return None
        form = f"{count}{_form(kind)}"
        if count <= MAX_LAYERS:
            return list(self._take(form))
        self._take(f"{struct.calcsize(form)}x")
        return None


def _form(kind: int) -> str:
    """The type of a number in metadata, for `struct`."""
    require(kind in _NUMBERS, f"metadata of the unknown type {kind}")
    return _NUMBERS[kind]


@functools.cache
def _kind(number: int) -> Any:
    """A type of tensors, of the package's `GGMLQuantizationType`; ValueError: an unknown one."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"tensors of type {number}, which this version of gguf lacks") from None
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        if kind.name not in _PLAIN:
            raise ValueError(f"tensors of type {kind.name}, which is not supported") from None
    return kind


def _raw(file: Path, start: int, size: int) -> np.ndarray:
    raw = np.fromfile(file, np.uint8, size, offset=start)
    require(raw.size == size, "the file has become shorter")
    return raw


def _four_bits(
    file: Path, shape: tuple[int, ...], start: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """See `Tensor`; of Q4_0, whose blocks are a scale and the low, then the high bits of bytes."""
    blocks = _raw(file, start, size).reshape(-1, 18)
    scales, both = np.ascontiguousarray(blocks[:, :2]).view("<f2"), blocks[:, 2:]
    values = np.concatenate([both & 15, both >> 4], axis=1).astype(np.int8) - np.int8(8)
    return values.reshape(shape), np.repeat(scales, 32, axis=1).reshape(shape)


def _read(file: Path, kind: Any, shape: tuple[int, ...], start: int, size: int) -> np.ndarray:
    """The numbers of a tensor, dequantised."""
    import gguf

    raw = _raw(file, start, size)
    if kind.name in _PLAIN:
        return raw.view(_PLAIN[kind.name]).reshape(shape)
    block, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
    width = shape[-1]  # the package takes rows of many blocks faster
    rows = raw.reshape(-1, width // block * bytes_of_block)
    out, count = np.empty((len(rows), width), np.float32), max(_AT_ONCE // width, 1)
    for i in range(0, len(rows), count):
        out[i : i + count] = gguf.dequantize(rows[i : i + count], kind)
    return out.reshape(shape)
