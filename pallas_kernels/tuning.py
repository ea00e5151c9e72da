"""Block sizes measured on a device, which override the defaults.

A table is `tuned/<device>.json`, written by `python -m benchmarks.tune` on that device. A device
without a table gets the defaults of each op's kernel. A table that is damaged, or that names
something this version does not know, is an error that names the file; it is never ignored.

{"device": "NVIDIA H200",
 "blocks": {"tree_conv1d": {"any": {"queries": 16, "channels": 128, "num_warps": 4}}}}

Other keys document where a table comes from and are not read.
"""

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import dispatch

DIRECTORY = Path(__file__).parent / "tuned"
# Ops with block sizes, and where their defaults are, a dict by case. Tables keep the names of ops
# when folders change.
OPS = {
    "expert_mlps": "moe.pallas_triton.DEFAULTS",
    "rms_norm": "rms_norm.pallas_triton.DEFAULTS",
    "ssd": "ssd.pallas_triton.DEFAULTS",
    "tree_attention": "tree_attention.config.DEFAULTS",
    "tree_attention_layer": "tree_attention.config.DEFAULTS",
    "tree_conv1d": "tree_conv1d.pallas_triton.DEFAULTS",
    "tree_scan": "tree_scan.pallas_triton.DEFAULTS",
}

Blocks = TypeVar("Blocks")


def chosen(op: str, case: str, defaults: Mapping[str, Blocks]) -> Blocks:
    """The block sizes of the default device's table for a case of an op, else that case's default.

    Raises:
        ValueError: the device's table cannot be read.
    """
    return load(path_of(device_kind())).get(op, {}).get(case, defaults[case])


def defaults(op: str) -> Mapping[str, Any]:
    """The default block sizes of an op by case."""
    module, _, name = OPS[op].rpartition(".")
    return getattr(importlib.import_module(f"pallas_kernels.{module}"), name)


def dtype_case(dtype: DTypeLike) -> str:
    """The case of ops whose block sizes depend on the type of their inputs."""
    return "float32" if jnp.dtype(dtype) == jnp.float32 else "bfloat16"


def device_kind() -> str:
    """The name of the default device, which inside an op is the one that it runs on."""
    device = dispatch.default_device()
    return str(getattr(device, "device_kind", device.platform))


def path_of(kind: str) -> Path:
    """The file of a device's table, which need not exist."""
    return DIRECTORY / (re.sub(r"\W+", "-", kind.lower()).strip("-") + ".json")


@functools.cache
def load(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """The block sizes of a table by op and case; empty if the file does not exist.

    Raises:
        ValueError: it is not a table, or has ops, cases, fields or values that do not exist.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the block sizes in {path}: {error}") from error
    try:
        return _parsed(json.loads(text), path)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no table of block sizes: {error}; remove it to use the defaults, or"
            " rewrite it with `python -m benchmarks.tune`"
        ) from error


def _parsed(table: Any, path: Path) -> dict[str, dict[str, Any]]:
    """A table with its values checked and made block sizes."""
    _require(isinstance(table, dict), "it is not a JSON object")
    kind, ops = table.get("device"), table.get("blocks")
    _require(
        isinstance(kind, str) and path_of(kind).name == path.name,
        f"its device is {kind!r}, which does not match the file name",
    )
    _require(isinstance(ops, dict), "it has no object 'blocks'")
    parsed: dict[str, dict[str, Any]] = {}
    for op, cases in ops.items():
        _require(op in OPS, f"it has an op {op!r}; known: {sorted(OPS)}")
        of_op = defaults(op)
        _require(isinstance(cases, dict), f"{op} is not an object")
        parsed[op] = {}
        for case, values in cases.items():
            _require(case in of_op, f"{op} has a case {case!r}; known: {sorted(of_op)}")
            names = [field.name for field in dataclasses.fields(of_op[case])]
            _require(
                isinstance(values, dict) and sorted(values) == sorted(names),
                f"{op}, {case}: its fields must be {names}",
            )
            for name, value in values.items():
                _require(
                    type(value) is int and value > 0 and value & (value - 1) == 0,
                    f"{op}, {case}: {name} = {value!r} is not a power of two",
                )
            parsed[op][case] = type(of_op[case])(**values)
    return parsed


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
