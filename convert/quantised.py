"""Quantised checkpoints: weights of 8 or 4 bits with scales, and their values.

The config says by which schemes a checkpoint was quantised and how many numbers share a scale, its
tensors which weights are, and how. A weight X and its scales become one tensor X, whose values are
computed in float32 when it is read, so that nothing after this knows of scales:

    FP8            X * X_scale, or X * X_scale_inv
    int8           (X - X_zero_point) * X_scale; most have no zero point
    NVFP4          X * (X_scale * X_scale_2): two numbers of a byte, the first in its low bits, and
                   scales of 16 inputs in float8
    NVFP4, packed  X_packed * (X_scale / X_global_scale), the same otherwise

That is the arithmetic of NVIDIA's ModelOpt, of DeepSeek's and Qwen's `fp8`, and of
compressed-tensors. A product of 8 bits and a scale of bfloat16 is exact in float32: rounded to
bfloat16, it is what programs compute that multiply in bfloat16.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.checkpoint.files import has_file, read_json
from stree_jax.messages import shown

MODELOPT = "hf_quant_config.json"  # of ModelOpt; config.json does not always say it too

_FIELDS = ("quantization_config", "compression_config", "quantization")
_SCHEMES = (
    "fp8",
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4"),  # ModelOpt
    *("float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized"),
)
# Tensors for programs that quantise activations or caches.
_OF_ACTIVATIONS = re.compile(
    r".*(?:[._](?:input|output|activation)|\.[qkv])_(?:global_scale|scale|zero_point)"
)

_E4M3, _E5M2 = _FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
_INT8, _UINT8 = _CODES = np.dtype(np.int8), np.dtype(np.uint8)
_SCALES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_MAX_BLOCKS = 16  # sizes of blocks with one scale
_GROUP = 16  # inputs that share a scale in NVFP4
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# The two numbers of each byte, as the parts of one, which NumPy gathers three times as fast.
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=-1).view(np.complex64)[:, 0]


class _Form(NamedTuple):
    """A form of quantised weights: the types of their tensors, by the ends of their names."""

    name: str
    types: dict[str, tuple[np.dtype, ...]]
    may_lack: str | None = None


_FP8 = _Form("FP8", {"": _FLOAT8, "_scale": _SCALES})
_FP8_INV = _Form("FP8", {"": _FLOAT8, "_scale_inv": _SCALES})
_INT = _Form("int8", {"": (_INT8,), "_scale": _SCALES, "_zero_point": (_INT8,)}, "_zero_point")
_FP4 = _Form("NVFP4", {"": (_UINT8,), "_scale": (_E4M3,), "_scale_2": _SCALES})
_PACKED = _Form("NVFP4", {"_packed": (_UINT8,), "_scale": (_E4M3,), "_global_scale": _SCALES})
_ENDS = ("_packed", "_global_scale", "_scale_2", "_scale_inv", "_scale", "_zero_point")


class Scheme(NamedTuple):
    """What the files of a checkpoint say about quantisation.

    Attributes:
        values: the config without that.
        said: where it is said; empty: nowhere.
        blocks: rows and columns that may share a scale, beside whole weights and single rows.
    """

    values: dict[str, Any]
    said: list[str]
    blocks: set[tuple[int, int]]


class Plain(NamedTuple):
    """A checkpoint without quantisation.

    Attributes:
        tensors: the tensors by name; what was quantised computes its values when it is read, and
            counts as bfloat16.
        notes: what was ignored, with reasons.
        quantised: how many weights are quantised, and how; empty: none.
    """

    tensors: dict[str, Tensor]
    notes: list[str]
    quantised: str


def read_scheme(path: Path, values: Mapping[str, Any], tables: Collection[str] = ()) -> Scheme:
    """Reads what a config says about quantisation.

    Args:
        path: path of the config file. `MODELOPT` may be beside it.
        values: content of that file.
        tables: names of tables in it that may say so instead.

    Raises:
        ValueError: a scheme is not known, or its blocks are none.
    """
    config, inside = without_scheme(values, tables)
    found = [(f"{path} says {name}", said) for name, said in inside.items()]
    if has_file(beside := path.with_name(MODELOPT)):
        said = read_json(beside).get("quantization")
        found.append((f"{beside} says quantization", _table(said) | {"quant_method": "modelopt"}))
    blocks = set()
    for where, said in found:
        for name in _schemes(said):
            if name not in _SCHEMES:
                raise ValueError(
                    f"{where}: the scheme {shown(name)} is not read, only {', '.join(_SCHEMES)};"
                    " use the bfloat16 original"
                )
        for block in _blocks(_table(said)):
            pair = block if isinstance(block, list) and len(block) == 2 else [0, 0]
            if not all(type(size) is int and 0 < size < 1 << 24 for size in pair):
                raise ValueError(f"{where}: a scale cannot be of a block {shown(block)}")
            blocks.add((pair[0], pair[1]))
        if len(blocks) > _MAX_BLOCKS:
            raise ValueError(f"{where}: {len(blocks)} sizes of blocks are too many to be real")
    return Scheme(config, [where for where, _ in found], blocks)


def without_scheme(
    values: Mapping[str, Any], tables: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config without what it says about quantisation, and that by the fields that say it."""
    config = {name: dict(x) if _is_table(x) else x for name, x in values.items()}
    inside = [(f"{name}.", config[name]) for name in tables if _is_table(config.get(name))]
    found = {
        f"{prefix}{name}": said
        for prefix, table in [("", config), *inside]
        for name in _FIELDS
        if (said := table.pop(name, None)) is not None
    }
    return config, found


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _table(value: Any) -> dict[str, Any]:
    """A table; empty, if it is none."""
    return dict(value) if _is_table(value) else {}


def _schemes(said: Any) -> Iterator[Any]:
    """Names of the schemes in what a config says."""
    table = _table(said)
    method, groups = table.get("quant_method", None if _is_table(said) else said), _groups_in(table)
    if method == "modelopt":
        names = [table.get("quant_algo")]  # null: only the cache has few bits
        if names == ["MIXED_PRECISION"]:
            layers = _table(table.get("quantized_layers")).values()
            names = [_table(layer).get("quant_algo") for layer in layers]
    elif method == "compressed-tensors":
        sparsity = _table(table.get("sparsity_config"))
        names = [each.get("format") for each in (table, sparsity, *groups)]
        names = [name for name in names if name not in ("dense", "mixed-precision")]
        names += ["transform_config"] if table.get("transform_config") else []
    else:
        yield method
        return
    yield from (name for name in names if name is not None)


def _groups_in(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of weights with one scheme."""
    return [_table(group) for group in _table(table.get("config_groups")).values()]


def _blocks(said: Mapping[str, Any]) -> Iterator[Any]:
    """Rows and columns that share a scale, in what a config says."""
    for table in (said, *(_table(group.get("weights")) for group in _groups_in(said))):
        yield from filter(None, (table.get("weight_block_size"), table.get("block_structure")))
        if table.get("group_size") not in (None, -1):
            yield [1, table["group_size"]]


def dequantised(path: Path, scheme: Scheme, tensors: Mapping[str, Tensor]) -> Plain:
    """Makes one tensor of each quantised weight and its scales. Reads none.

    Args:
        path: the checkpoint, for messages.
        scheme: what its files say.
        tensors: its tensors by name.

    Raises:
        ValueError: a tensor is missing, or has a shape or a type that it cannot have; or a weight
            is quantised, and no file says so.
    """
    plain, count = dict(tensors), Counter[str]()
    for base, ends in _found(tensors).items():
        if not scheme.said:
            raise ValueError(
                f"{path}: {base!r:.80} is quantised, and no file says how: get the config.json that"
                " belongs to it, with a quantization_config"
            )
        try:
            form, tensor = _one(base, {end: tensors[base + end] for end in ends}, scheme.blocks)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        for end in ends:
            plain.pop(base + end, None)
        plain[base] = tensor
        count[form] += 1
    notes = []
    if scheme.said:
        skipped = [name for name in plain if _OF_ACTIVATIONS.fullmatch(name)]
        for name in skipped:
            del plain[name]
        if skipped:
            notes.append(
                f"{len(skipped)} scales of activations or caches, such as {skipped[0]:.200}:"
                " only weights are quantised here"
            )
        if not count:
            notes.append(f"{scheme.said[0]}: no weight is quantised")
    words = [f"{number} weights in {form}" for form, number in sorted(count.items())]
    return Plain(plain, notes, ", ".join(words))


def _found(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The quantised weights, and the ends of the names of their tensors."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        end = next((end for end in _ENDS if name.endswith(end)), "")
        base = name.removesuffix(end)
        if end and (base in tensors or base.endswith("weight")):
            found.setdefault(base, []).append(end)
        elif tensor.dtype in _FLOAT8 or (tensor.dtype in _CODES and base.endswith("weight")):
            found.setdefault(name, [])  # even if it has no scale
    return {base: ["", *ends] if base in tensors else ends for base, ends in found.items()}


def _form(base: str, parts: Mapping[str, Tensor]) -> _Form:
    """The form of a quantised weight, whose tensors are there and have the right types."""
    dtype = parts[""].dtype if "" in parts else None
    if "_packed" in parts or "_global_scale" in parts:
        form = _PACKED
    elif "_scale_2" in parts or dtype == _UINT8:
        form = _FP4
    elif "_scale_inv" in parts:
        form = _FP8_INV
    else:
        form = _INT if dtype == _INT8 else _FP8
    for end in parts.keys() - form.types.keys():
        raise ValueError(f"{base + end!r:.120} is not of a weight in {form.name}")
    for end, types in form.types.items():
        if end not in parts and end != form.may_lack:
            raise ValueError(f"{base + end!r:.120} is missing, of a weight in {form.name}")
        if end in parts and parts[end].dtype not in types:
            raise ValueError(
                f"{base + end!r:.120} holds {parts[end].dtype}; of a weight in {form.name} it is"
                f" {' or '.join(dtype.name for dtype in types)}"
            )
    return form


def _one(
    base: str, parts: Mapping[str, Tensor], blocks: Collection[tuple[int, int]]
) -> tuple[str, Tensor]:
    """The form of a quantised weight, and its tensor."""
    form = _form(base, parts)
    weight, scale, *others = (end for end in form.types if end in parts)
    shape, numbers = parts[weight].shape, parts[scale].shape
    if len(shape) < 2 or 0 in shape:
        raise ValueError(f"{base + weight!r:.120} has shape {shape!s:.80}, and is no matrix")
    known = [shape[-2:], (1, shape[-1]), *blocks]
    of_others = [numbers]
    if form.name == "NVFP4":
        shape = (*shape[:-1], 2 * shape[-1])
        known, of_others = [(1, _GROUP)], [(), (1,)]
    for end in others:
        if parts[end].shape not in of_others:
            have = f"{parts[end].shape!s:.80}"
            raise ValueError(f"{base + end!r:.120} has shape {have}, not {of_others[-1]!s:.80}")
    # A row, say, may also be a group as wide as the matrix.
    sizes = {(min(block[0], shape[-2]), min(block[1], shape[-1])) for block in known}
    grid = (*numbers, *[1] * (len(shape) - len(numbers)))
    fitting: list[tuple[int, ...]] = [size for size in sizes if _grid(shape, size) == grid]
    if math.prod(numbers) == 1 and form.name != "NVFP4":
        fitting = [(shape[-2], shape[-1])]
    if len(fitting) != 1:
        grids = " or ".join(str(_grid(shape, size)) for size in sorted(sizes))
        raise ValueError(
            f"{base + scale!r:.120} has shape {numbers!s:.80}; those of a weight {shape!s:.80} are"
            f" {grids:.200}"
        )
    read = functools.partial(_read, form, base, parts, shape, fitting[0])
    return form.name, Tensor(shape, np.dtype(ml_dtypes.bfloat16), read)


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of all blocks; the last ones of a matrix may be smaller."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _read(
    form: _Form,
    base: str,
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...],
    block: tuple[int, ...],
) -> np.ndarray:
    """The values of a quantised weight, float32."""
    weight, end, *others = (end for end in form.types if end in parts)
    values, scale = parts[weight].read(), _scale(base + end, parts[end])
    if form.name == "NVFP4":
        values = _PAIRS[values].view(np.float32)
        of_all = _scale(base + others[0], parts[others[0]]).reshape(())
        if of_all == 0:
            raise ValueError(f"{base + others[0]!r:.120} is 0")
        scale = scale / of_all if form is _PACKED else scale * of_all
    else:
        values = values.astype(np.float32)
        for zero_point in others:
            values -= _spread(parts[zero_point].read().astype(np.float32), shape, block)
    values *= _spread(scale, shape, block)
    return values


def _scale(name: str, tensor: Tensor) -> np.ndarray:
    """Scales, float32."""
    values = tensor.read().astype(np.float32)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"{name!r:.120} holds NaN, infinity or a negative number")
    return values


def _spread(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
    """One number for each block, as an array that multiplies the weight."""
    if scale.size == 1:
        return scale.reshape(())
    scale = scale.reshape(_grid(shape, block))
    rows = np.repeat(scale, block[0], axis=-2)[..., : shape[-2], :]
    of_rows = block[1] == shape[-1]
    return rows if of_rows else np.repeat(rows, block[1], axis=-1)[..., : shape[-1]]
