"""Quantised checkpoints in the published layouts, and the values of their weights."""

import functools
import json
import re

import ml_dtypes
import numpy as np

from tests.convert import checkpoints
from tests.extensions import ling_files, mtp_files, qwen_files

E4M3, E5M2, BFLOAT16 = (
    np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16")
)
BITS = {E4M3: (4, 3), E5M2: (5, 2)}  # of the exponent and the mantissa


def number(bits, exponent, mantissa):
    """The number of a sign, an exponent and a mantissa."""
    sign = -1.0 if bits >> (exponent + mantissa) & 1 else 1.0
    power, part = bits >> mantissa & (2**exponent - 1), bits % 2**mantissa / 2**mantissa
    least = 2 - 2 ** (exponent - 1)
    return sign * (part * 2.0**least if power == 0 else (1 + part) * 2.0 ** (least - 1 + power))


def blocked(shape, block):
    """The size of a block, and the shape of its scales."""
    if block == "weight":
        return shape[-2:], (1,) * len(shape)
    rows, columns = (1, shape[-1]) if block == "row" else block
    return (rows, columns), (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))


def products(shape, block, value, scales):
    """Each number of a weight times the scale of its block, rounded to float32."""
    out = np.empty(shape, np.float32)
    for index in np.ndindex(shape):
        of = (*index[:-2], index[-2] // block[0], index[-1] // block[1])
        of = tuple(i % n for i, n in zip(of, scales.shape, strict=True))
        out[index] = value(index, of) * np.float64(scales[of])
    return out


def fp8(block, end="_scale", kind=E4M3, dtype=np.float32, stored=lambda scale: scale):
    """How a weight in FP8 is made: its tensors by the ends of their names, and its values."""

    def make(rng, shape):
        exponent, mantissa = BITS[kind]
        size, grid = blocked(shape, block)
        scale = rng.uniform(0.01, 0.1, grid).astype(dtype)
        finite = [bits for bits in range(256) if bits & 127 < {E4M3: 127, E5M2: 124}[kind]]
        bits = rng.choice(finite, shape).astype(np.uint8)
        values = products(shape, size, lambda i, _: number(int(bits[i]), exponent, mantissa), scale)
        return {"": bits.view(kind), end: stored(scale)}, values

    return make


def int8(block, zeros=False):
    def make(rng, shape):
        size, grid = blocked(shape, block)
        scale = rng.uniform(0.01, 0.1, grid).astype(BFLOAT16)
        codes = rng.integers(-128, 128, shape).astype(np.int8)
        zero = rng.integers(-9, 9, grid).astype(np.int8) * zeros
        values = products(shape, size, lambda i, of: int(codes[i]) - int(zero[of]), scale)
        return {"": codes, "_scale": scale} | ({"_zero_point": zero} if zeros else {}), values

    return make


def int4(block):
    def make(rng, shape):
        size, grid = blocked(shape, block)
        scale = rng.uniform(0.01, 0.1, grid).astype(BFLOAT16)
        codes = rng.integers(0, 16, shape)
        words = sum(codes[..., i::8] << 4 * i for i in range(8))
        parts = {"_packed": words.astype(np.uint32).view(np.int32), "_scale": scale}
        values = products(shape, size, lambda i, _: int(codes[i]) - 8, scale)
        return parts | {"_shape": np.array(shape)}, values

    return make


def nvfp4(packed):
    """In the names of compressed-tensors, whose global scale divides, or in those of ModelOpt."""

    def make(rng, shape):
        size, grid = blocked(shape, (1, 16))
        bits = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
        local = rng.integers(40, 90, grid).astype(np.uint8)
        of_all = np.float32(rng.uniform(3, 30) if packed else rng.uniform(0.01, 0.1))
        scale = np.empty(grid, np.float32)
        for index in np.ndindex(grid):
            own = number(int(local[index]), 4, 3)
            scale[index] = own / np.float64(of_all) if packed else own * np.float64(of_all)

        def value(index, _):
            byte = int(bits[(*index[:-1], index[-1] // 2)])
            return number(byte >> 4 if index[-1] % 2 else byte & 15, 2, 1)

        ends = ("_packed", "_scale", "_global_scale") if packed else ("", "_scale", "_scale_2")
        parts = (bits, local.view(E4M3), of_all.reshape(1) if packed else of_all)
        return dict(zip(ends, parts, strict=True)), products(shape, size, value, scale)

    return make


FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 6]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def compressed(form, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


def ints(strategy, symmetric=True, **more):
    """As compressed-tensors writes it of integers of 8 bits."""
    said = dict(num_bits=8, type="int", strategy=strategy, symmetric=symmetric, actorder=None)
    return compressed("int-quantized", **(said | more))


FLOATS = compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)

KINDS = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float32": "F32", "int8": "I8"}
KINDS |= {"float8_e5m2": "F8_E5M2", "uint8": "U8", "int32": "I32", "int64": "I64"}


def write(path, config, tensors, name="model.safetensors"):
    """Writes a checkpoint; the writer of safetensors takes no float8 from NumPy."""
    path.mkdir(exist_ok=True)
    header, start = {}, 0
    for key, value in tensors.items():
        kind, end = KINDS[value.dtype.name], start + value.nbytes
        header[key] = {"dtype": kind, "shape": value.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    (path / name).write_bytes(len(text).to_bytes(8, "little") + text + data)
    (path / "config.json").write_text(json.dumps(config))
    return path


def both(folder, original, said, makers, beside=()):
    """A checkpoint, whose matrices the first fitting pattern makes, and its values."""
    rng, (config, tensors) = np.random.default_rng(0), checkpoints.read(original)
    own, plain = {}, {}
    for name, value in tensors.items():
        make = next((make for of, make in makers if re.search(of, name)), None)
        if make is None:
            own[name] = plain[name] = value.astype(BFLOAT16) if value.ndim == 2 else value
            continue
        parts, plain[name] = make(rng, value.shape)
        own |= {name + end: np.asarray(part) for end, part in parts.items()}
        own |= {name.removesuffix("weight") + end: np.float32(2).reshape(()) for end in beside}
    beside_config = said if "quantization" in said else None
    path = write(folder / "quantised", config | ({} if beside_config else said), own)
    if beside_config:
        (path / "hf_quant_config.json").write_text(json.dumps(said))
    return path, write(folder / "plain", config, plain)


OF_QWEN = r"(in_proj_qkv|in_proj_z|out_proj|[qkvo]_proj|mlp\..*_proj)\.weight"
EXPERTS = r"\.experts\..*_proj(\.weight)?$"  # in the head all are in a tensor
CHECKPOINTS = {
    "Qwen3.8-27B-FP8, with its head": (
        functools.partial(qwen_files.wrapped, config=qwen_files.config_27b()),
        {
            "quantization_config": FINE
            | {"fmt": "e4m3", "modules_to_not_convert": ["lm_head", "model.visual", "mtp.fc"]}
        },
        [(OF_QWEN, fp8((8, 6), "_scale_inv", dtype=BFLOAT16))],
        (),
        "32 weights in FP8",  # the published file has 407 of the same kinds
    ),
    "Qwen3.5, experts": (
        functools.partial(qwen_files.saved, experts=True),
        {"quantization_config": FINE},
        [(EXPERTS, fp8((8, 6), "_scale_inv"))],
        (),
        "26 weights in FP8",
    ),
    "Ling 3, with its head": (
        ling_files.saved,
        {"quantization_config": FINE},
        [(r"(experts|self_attn|attention).*(_proj|_a|_b)\.weight$", fp8((8, 6), "_scale_inv"))],
        (),
        "45 weights in FP8",
    ),
    "Nemotron-3 of ModelOpt": (
        mtp_files.saved,
        json.loads("""{
          "producer": {"name": "modelopt"},
          "quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8",
          "quantized_layers": {"backbone.layers.3.mixer.experts.0.up_proj": {"quant_algo": "NVFP4",
          "group_size": 16}, "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"}}}
        }"""),
        [
            (r"backbone.*\.experts\..*weight", nvfp4(False)),
            ("lm_head|embeddings", nvfp4(False)),
            (
                r"backbone.*(shared_experts|in_proj|out_proj|k_proj|v_proj).*weight",
                fp8("weight", stored=lambda x: x.reshape(())),
            ),
        ],
        ("input_scale", "k_scale"),
        "6 weights in FP8, 14 weights in NVFP4",
    ),
    "Nemotron-3 of compressed-tensors": (
        mtp_files.saved,
        {
            "quantization_config": compressed("mixed-precision")
            | {
                "config_groups": {
                    name: {"format": each["format"]} | each["config_groups"]["group_0"]
                    for name, each in {
                        "experts": compressed(
                            "nvfp4-pack-quantized",
                            **dict(num_bits=4, type="float", symmetric=True),
                            **dict(strategy="tensor_group", group_size=16),
                        ),
                        "shared": ints("group", False, group_size=5),
                        "others": FLOATS,
                    }.items()
                }
            }
            | {"kv_cache_scheme": {"num_bits": 8}, "sparsity_config": {}, "transform_config": {}}
        },
        [
            (r"backbone.*\.experts\..*weight", nvfp4(True)),
            (r"backbone.*shared_experts.*weight", int8((1, 5), zeros=True)),
            (r"backbone.*(_proj|embeddings)\.weight", fp8("row", dtype=BFLOAT16)),
        ],
        ("input_global_scale", "v_scale"),
        "11 weights in FP8, 12 weights in NVFP4, 2 weights in int8",
    ),
}
