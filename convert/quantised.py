"""Quantised checkpoints: weights of 8 or 4 bits with scales, and their values.

The config says by which schemes a checkpoint was quantised and how many numbers share a scale, its
tensors which weights are, and how. A weight X and its scales become one tensor X, whose values are
computed in float32 when it is read. Nothing after this knows of scales, but where a model in 4 bits
takes such numbers as they are:

    FP8            X * X_scale, or X * X_scale_inv
    int8           (X - X_zero_point) * X_scale; most have no zero point
    NVFP4          X * (X_scale * X_scale_2): two numbers of a byte, the first in its low bits, and
                   scales of 16 inputs in float8
    NVFP4, packed  X_packed * (X_scale / X_global_scale), the same otherwise
    int4           (X_packed - 8) * X_scale: eight numbers of an int32, the first in its low bits

That is the arithmetic of NVIDIA's ModelOpt, of DeepSeek's and Qwen's `fp8`, and of
compressed-tensors. A product of 8 bits and a scale of bfloat16 is exact in float32: rounded to
bfloat16, it is what programs compute that multiply in bfloat16.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels.matmul import GROUP
from stree_jax.checkpoint.arrays import Tensor
from stree_jax.checkpoint.files import has_file, read_json
from stree_jax.messages import shown

MODELOPT = "hf_quant_config.json"  # of ModelOpt; config.json does not always say it too

_FIELDS = ("quantization_config", "compression_config", "quantization")
# Sizes of what shares a scale: a row, a matrix of any size.
_ROW, _WHOLE = (1, 1 << 24), (1 << 24, 1 << 24)
# Schemes by their names, and the forms of their weights; None: it is not said.
_MODELOPT: dict[str, Any] = {
    "FP8": ("FP8", {_WHOLE}),
    "FP8_PER_CHANNEL_PER_TOKEN": ("FP8", {_ROW}),
    "NVFP4": ("NVFP4", None),
    "W4A16_NVFP4": ("NVFP4", None),
}
_COMPRESSED = {
    "float-quantized": "FP8",
    "int-quantized": "int8",
    "naive-quantized": None,
    "nvfp4-pack-quantized": "NVFP4",
    "pack-quantized": "int4",
    "dense": None,
    "mixed-precision": None,
}
_KINDS = (
    ((8, "float"), "FP8"),
    ((8, "int"), "int8"),
    ((4, "int"), "int4"),
    ((4, "float"), "NVFP4"),
)
_ORDERS = (None, False, "weight", "static")  # values of `actorder` that move no column
# Tensors for programs that quantise activations or caches.
_OF_ACTIVATIONS = re.compile(
    r".*(?:[._](?:input|output|activation)|\.[qkv])_(?:global_scale|scale|zero_point)"
)

_E4M3, _E5M2 = _FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
_INT8, _UINT8 = _CODES = np.dtype(np.int8), np.dtype(np.uint8)
_INT32 = np.dtype(np.int32)
_SCALES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_MAX_GROUPS = 64  # of weights, that a config tells apart by patterns
_GROUP = 16  # inputs that share a scale in NVFP4
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# The two numbers of each byte, as the parts of one, which NumPy gathers three times as fast.
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=-1).view(np.complex64)[:, 0]


class _Form(NamedTuple):
    """A form of quantised weights: types of tensors by the ends of their names."""

    name: str
    types: dict[str, tuple[np.dtype, ...]]
    may_lack: str | None = None


_FP8 = _Form("FP8", {"": _FLOAT8, "_scale": _SCALES})
_FP8_INV = _Form("FP8", {"": _FLOAT8, "_scale_inv": _SCALES})
_INT = _Form("int8", {"": (_INT8,), "_scale": _SCALES, "_zero_point": (_INT8,)}, "_zero_point")
_FP4 = _Form("NVFP4", {"": (_UINT8,), "_scale": (_E4M3,), "_scale_2": _SCALES})
_PACKED = _Form("NVFP4", {"_packed": (_UINT8,), "_scale": (_E4M3,), "_global_scale": _SCALES})
_INT4 = _Form(
    "int4", {"_packed": (_INT32,), "_scale": _SCALES, "_shape": (_INT32, np.dtype(np.int64))}
)
_ENDS = ("_packed", "_shape", "_global_scale", "_scale_2", "_scale_inv", "_scale", "_zero_point")


class _Group(NamedTuple):
    """Weights that a config tells apart; None: it does not say."""

    form: str | None
    blocks: Collection[tuple[int, int]] | None = None  # rows and columns that may share a scale
    symmetric: bool | None = None  # without zero points
    dtype: np.dtype | None = None  # that of FP8
    modules: Collection[str] = ()  # theirs by name; there may be others

    def problem(self, form: str, dtype: np.dtype, has_zeros: bool) -> str | None:
        """Says why a weight is not of this group; None: it may be."""
        if self.form not in (None, form):
            return f"is in {form}, not in {self.form}"
        if self.dtype not in (None, dtype):
            return f"holds {dtype}, not {self.dtype}"
        if self.symmetric is has_zeros:
            return f"has {'' if has_zeros else 'no '}zero points, but symmetric = {has_zeros}"
        return None


class Scheme(NamedTuple):
    """A config without what is said about quantisation; and that, by where it is said."""

    values: dict[str, Any]
    said: list[tuple[str, list[_Group]]]


class Plain(NamedTuple):
    """A checkpoint without quantisation: its tensors by name.

    Those that were quantised compute their values when they are read, and count as bfloat16.
    """

    tensors: dict[str, Tensor]
    notes: list[str]  # what was ignored, with reasons
    quantised: str  # how many weights are, and how; empty: none


def read_scheme(path: Path, values: Mapping[str, Any], tables: Collection[str] = ()) -> Scheme:
    """Reads what a config, its tables and `MODELOPT` say; refuses unknown schemes."""
    config, inside = without_scheme(values, tables)
    schemes = [(f"{path} says {name}", said) for name, said in inside.items()]
    if has_file(beside := path.with_name(MODELOPT)):
        said = read_json(beside).get("quantization")
        schemes.append((f"{beside} says quantization", _table(said) | {"quant_method": "modelopt"}))
    known = []
    for where, said in schemes:
        try:
            known += [(where, groups) for groups in _groups(said)]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return Scheme(config, known)


def without_scheme(
    values: Mapping[str, Any], tables: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config without what it says about quantisation; and that, by field."""
    config = {name: dict(x) if isinstance(x, Mapping) else x for name, x in values.items()}
    inside = [
        (f"{name}.", config[name]) for name in tables if isinstance(config.get(name), Mapping)
    ]
    schemes = {
        f"{prefix}{name}": said
        for prefix, table in [("", config), *inside]
        for name in _FIELDS
        if (said := table.pop(name, None)) is not None
    }
    return config, schemes


def _table(value: Any) -> dict[str, Any]:
    """A table; empty, if it is none."""
    return dict(value) if isinstance(value, Mapping) else {}


def _groups(said: Any) -> Iterator[list[_Group]]:
    """Groups of weights; each weight is in one of each list."""
    table = _table(said)
    method = table.get("quant_method", None if isinstance(said, Mapping) else said)
    if method == "modelopt":
        yield _of_modelopt(table)
        yield _of_config(table)
    elif method == "compressed-tensors":
        _known(_table(table.get("sparsity_config")).get("format", "dense"), _COMPRESSED)
        if table.get("transform_config"):
            _known("transform_config", _COMPRESSED)
        yield _of_config(table) or [_Group(_known(table.get("format", "dense"), _COMPRESSED))]
    else:
        _known(method, {"fp8": None})
        types = {"e4m3": _E4M3, "e5m2": _E5M2, None: None}
        yield [_Group("FP8", _sizes(table) or None, dtype=_known(table.get("fmt"), types))]


def _of_modelopt(table: Mapping[str, Any]) -> list[_Group]:
    """The groups of an algorithm, which may be one for each module."""
    modules: dict[str, Any] = {"": dict(table)}
    if table.get("quant_algo") == "MIXED_PRECISION":
        modules = _table(table.get("quantized_layers"))
    groups: dict[tuple, set[str]] = {}
    for module, layer in modules.items():
        said = _table(layer)
        if said.get("quant_algo") is not None:  # null: only the cache has few bits
            form, blocks = _known(said["quant_algo"], _MODELOPT)
            blocks = blocks or _sizes(said)
            groups.setdefault((form, tuple(blocks)), set()).add(module)
    return [_Group(form, blocks or None, modules=names) for (form, blocks), names in groups.items()]


def _of_config(table: Mapping[str, Any]) -> list[_Group]:
    """The groups of `config_groups`."""
    groups = _table(table.get("config_groups"))
    if len(groups) > _MAX_GROUPS:
        raise ValueError(f"{len(groups)} groups of weights are too many to be real")
    known_groups = []
    for group in map(_table, groups.values()):
        weights = _table(group.get("weights"))
        names = [part.get("format") for part in (group, table)]
        forms = [_known(name, _COMPRESSED) for name in names if name is not None]
        form = next(filter(None, forms), None)
        kind = weights.get("num_bits"), weights.get("type")
        if kind != (None, None):
            stored = next((name for known, name in _KINDS if known == kind), None)
            if stored is None or form not in (None, stored):
                words = f"num_bits = {shown(kind[0])} and type = {shown(kind[1])}"
                raise ValueError(f"{words} are not read" + (f" in {form}" if form else ""))
            form = stored
        if (order := weights.get("actorder")) not in _ORDERS:
            raise ValueError(f"actorder = {shown(order)} is not read: it moves columns")
        symmetric = weights.get("symmetric")
        if not (symmetric is None or isinstance(symmetric, bool)):
            raise ValueError(f"symmetric must be true or false, got {shown(symmetric)}")
        sizes = _sizes(weights)
        of_strategy: dict[Any, Any] = {"tensor": {_WHOLE}, "channel": {_ROW}}
        of_strategy |= dict.fromkeys(("group", "block", "tensor_group"), sizes)
        of_strategy |= {None: {_WHOLE, _ROW, *sizes} if sizes else None}
        blocks = _known(weights.get("strategy"), of_strategy, "strategy")
        targets = group["targets"] if isinstance(group.get("targets"), list) else []
        modules = {target for target in targets if isinstance(target, str)}
        known_groups.append(_Group(form, blocks, symmetric, modules=modules))
    return known_groups


def _known(name: Any, known: Mapping[Any, Any], what: str = "scheme") -> Any:
    """The meaning of a scheme's name."""
    if not isinstance(name, str | None) or name not in known:
        names = ("fp8", *_MODELOPT, *_COMPRESSED) if what == "scheme" else filter(None, known)
        raise ValueError(
            f"the {what} {shown(name)} is not read, only {', '.join(names)}; use the bfloat16"
            " original"
        )
    return known[name]


def _sizes(said: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Rows and columns that share a scale."""
    group = said.get("group_size")
    blocks = [*filter(None, (said.get("weight_block_size"), said.get("block_structure")))]
    blocks += [] if group in (None, -1) else [[1, group]]
    for block in blocks:
        pair = block if isinstance(block, list) and len(block) == 2 else [0, 0]
        if not all(type(size) is int and 0 < size < 1 << 24 for size in pair):
            raise ValueError(f"a scale cannot be of a block {shown(block)}")
    return {(rows, columns) for rows, columns in blocks}


def dequantised(path: Path, scheme: Scheme, tensors: Mapping[str, Tensor]) -> Plain:
    """Makes one tensor of each quantised weight and its scales. Reads none.

    ValueError: a tensor is missing, or is not as it must be, or as the files of the checkpoint say.
    """
    plain, count = dict(tensors), Counter[str]()
    for base, ends in _ends_of(tensors).items():
        if not any(groups for _, groups in scheme.said):
            raise ValueError(
                f"{path}: {base!r:.80} is quantised, and no file says how: get the config.json that"
                " belongs to it, with a quantization_config"
            )
        try:
            form, tensor = _one(base, {end: tensors[base + end] for end in ends}, scheme)
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
            notes.append(f"{scheme.said[0][0]}: no weight is quantised")
    words = [f"{number} weights in {form}" for form, number in sorted(count.items())]
    return Plain(plain, notes, ", ".join(words))


def _ends_of(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The quantised weights, and the ends of the names of their tensors."""
    ends_of: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        end = next((end for end in _ENDS if name.endswith(end)), "")
        base = name.removesuffix(end)
        if end and (base in tensors or base.endswith("weight")):
            ends_of.setdefault(base, []).append(end)
        elif tensor.dtype in _FLOAT8 or (tensor.dtype in _CODES and base.endswith("weight")):
            ends_of.setdefault(name, [])  # even if it has no scale
    return {base: ["", *ends] if base in tensors else ends for base, ends in ends_of.items()}


def _form(base: str, parts: Mapping[str, Tensor]) -> _Form:
    """The form of a quantised weight, whose tensors have the right types."""
    dtype = parts[""].dtype if "" in parts else None
    if "_packed" in parts and parts["_packed"].dtype == _INT32:
        form = _INT4
    elif "_packed" in parts or "_global_scale" in parts:
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


def _blocks(base: str, form: _Form, parts: Mapping[str, Tensor], scheme: Scheme) -> set:
    """The blocks that may share a scale by all that is said about a weight."""
    blocks = {(1, _GROUP)} if form.name == "NVFP4" else None
    dtype = parts[next(iter(form.types))].dtype
    for where, groups in scheme.said:
        module = base.removesuffix(".weight")
        nearest = [group for group in groups if module in group.modules] or groups
        problems = [group.problem(form.name, dtype, "_zero_point" in parts) for group in nearest]
        fitting = [
            group for group, problem in zip(nearest, problems, strict=True) if problem is None
        ]
        if nearest and not fitting:
            raise ValueError(f"{base!r:.120} {problems[0]}, in what {where}")
        if fitting and all(group.blocks is not None for group in fitting):
            said = {block for group in fitting for block in group.blocks or ()}
            blocks = said if blocks is None else blocks & said
    return {_WHOLE, _ROW} if blocks is None else blocks


def _one(base: str, parts: Mapping[str, Tensor], scheme: Scheme) -> tuple[str, Tensor]:
    """The form of a quantised weight, and its tensor."""
    form = _form(base, parts)
    known = _blocks(base, form, parts, scheme)
    weight, scale, *others = (end for end in form.types if end in parts)
    shape, numbers = parts[weight].shape, parts[scale].shape
    if len(shape) < 2 or 0 in shape:
        raise ValueError(f"{base + weight!r:.120} has shape {shape!s:.80}, and is no matrix")
    of_others = [numbers]
    if form is _INT4:
        shape, of_others = (*shape[:-1], 8 * shape[-1]), [(len(shape),)]
    elif form.name == "NVFP4":
        shape = (*shape[:-1], 2 * shape[-1])
        of_others = [(), (1,)]
    for end in others:
        if parts[end].shape not in of_others:
            have = f"{parts[end].shape!s:.80}"
            raise ValueError(f"{base + end!r:.120} has shape {have}, not {of_others[-1]!s:.80}")
    # A row, say, may also be a group as wide as the matrix.
    sizes = {(min(block[0], shape[-2]), min(block[1], shape[-1])) for block in known}
    grid = (*numbers, *[1] * (len(shape) - len(numbers)))
    fitting: list[tuple[int, ...]] = [size for size in sizes if _grid(shape, size) == grid]
    if math.prod(numbers) == 1 and shape[-2:] in sizes:
        fitting = [shape[-2:]]
    if len(fitting) != 1:
        grids = " or ".join(str(_grid(shape, size)) for size in sorted(sizes))
        raise ValueError(
            f"{base + scale!r:.120} has shape {numbers!s:.80}; those of a weight {shape!s:.80} are"
            f" {grids or 'not said':.200}"
        )
    block = fitting[0]
    stored = _Weight(form, base, parts, shape, block)
    # Float32 scales may have no float16.
    has_half = form is _INT4 and parts["_scale"].dtype.itemsize == 2
    four_bits = stored.four_bits if has_half and block[0] == 1 and block[1] % GROUP == 0 else None
    bits = 4 if form.name in ("NVFP4", "int4") else 8
    dtype = np.dtype(ml_dtypes.bfloat16)
    return form.name, Tensor(shape, dtype, stored.read, four_bits=four_bits, bits=bits)


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of all blocks; the last ones may be smaller."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


class _Weight(NamedTuple):
    """A quantised weight, whose numbers have not been read."""

    form: _Form
    base: str
    parts: Mapping[str, Tensor]  # by the ends of their names
    shape: tuple[int, ...]
    block: tuple[int, ...]  # that shares a scale

    def read(self) -> np.ndarray:
        """The values, float32."""
        weight, end, *others = (end for end in self.form.types if end in self.parts)
        scale = self._scale(end)
        if self.form is _INT4:
            values = self._nibbles().astype(np.float32)
        elif self.form.name == "NVFP4":
            values = _PAIRS[self.parts[weight].read()].view(np.float32)
            of_all = self._scale(others[0]).reshape(())
            if of_all == 0:
                raise ValueError(f"{self.base + others[0]!r:.120} is 0")
            scale = scale / of_all if self.form is _PACKED else scale * of_all
        else:
            values = self.parts[weight].read().astype(np.float32)
            for zero_point in others:
                values -= self._spread(self.parts[zero_point].read().astype(np.float32))
        values *= self._spread(scale)
        return values

    def four_bits(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Tensor`."""
        scale = self._scale("_scale").astype(np.float16)
        return self._nibbles(), np.broadcast_to(self._spread(scale), self.shape)

    def _nibbles(self) -> np.ndarray:
        """The values in int4, int8."""
        shape = self.parts["_shape"].read().tolist()
        if shape != [*self.shape]:
            raise ValueError(
                f"{self.base + '_shape'!r:.120} is {shape!s:.80}, and numbers are packed for"
                f" {self.shape!s:.80}; inputs must be a multiple of 8"
            )
        packed = np.ascontiguousarray(self.parts["_packed"].read()).view(np.uint8)
        both = np.stack([packed & 15, packed >> 4], axis=-1).reshape(shape)
        return both.astype(np.int8) - np.int8(8)

    def _scale(self, end: str) -> np.ndarray:
        """Scales, float32."""
        values = self.parts[end].read().astype(np.float32)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{self.base + end!r:.120} holds NaN, infinity or a negative number")
        return values

    def _spread(self, scale: np.ndarray) -> np.ndarray:
        """One number for each block, as an array that multiplies the weight."""
        if scale.size == 1:
            return scale.reshape(())
        scale = scale.reshape(_grid(self.shape, self.block))
        rows, columns = self.shape[-2:]
        of_rows = np.repeat(scale, self.block[0], axis=-2)[..., :rows, :]
        if self.block[1] == columns:
            return of_rows
        return np.repeat(of_rows, self.block[1], axis=-1)[..., :columns]
