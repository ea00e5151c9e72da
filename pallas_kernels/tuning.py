"""Block sizes that were measured on a device, which come before the defaults.

A table is `tuned/<device>.json`, written by `python -m benchmarks.tune` on that device. A device
without a table gets the defaults of each op's `config.py`; a table that is damaged, or says what
this version does not know, is an error that names the file, never ignored.

{"device": "NVIDIA H200",
 "blocks": {"replay": {"bfloat16": {"nodes": 32, "state": 4096, "num_warps": 4, "num_stages": 1}}}}

Other keys beside these two say where a table comes from, and are not read.
"""

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

DIRECTORY = Path(__file__).parent / "tuned"
OPS = (
    "attention_tree",
    "best_token",
    "expert_mlps",
    "gated_rms_norm",
    "mamba2_tree",
    "replay",
    "replay_tree_scan",
    "ssd",
    "tree_attention",
    "tree_conv1d",
    "tree_scan",
)

Blocks = TypeVar("Blocks")


def chosen(op: str, case: str, defaults: Mapping[str, Blocks]) -> Blocks:
    """What this device's table has for a case of an op, else the default of that case.

    Raises:
        ValueError: the device's table cannot be read.
    """
    return load(path_of(device_kind())).get(op, {}).get(case, defaults[case])


def dtype_case(dtype: DTypeLike) -> str:
    """The case of ops whose block sizes depend on the type of their inputs."""
    return "float32" if jnp.dtype(dtype) == jnp.float32 else "bfloat16"


def device_kind() -> str:
    """What the device calls itself that computations go to by default."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    return str(getattr(device, "device_kind", device.platform))


def path_of(kind: str) -> Path:
    """Where the table of a device is, if there is one."""
    return DIRECTORY / (re.sub(r"\W+", "-", kind.lower()).strip("-") + ".json")


@functools.cache
def load(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """The block sizes of a table by op and case; nothing if the file does not exist.

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
            f"{path} is no table of block sizes: {error}; remove it for the defaults, or write it"
            " anew with `python -m benchmarks.tune`"
        ) from error


def _parsed(table: Any, path: Path) -> dict[str, dict[str, Any]]:
    _require(isinstance(table, dict), "it is not a JSON object")
    kind, ops = table.get("device"), table.get("blocks")
    _require(
        isinstance(kind, str) and path_of(kind).name == path.name,
        f"its device is {kind!r}, which is not that of its file name",
    )
    _require(isinstance(ops, dict), "it has no object 'blocks'")
    parsed: dict[str, dict[str, Any]] = {}
    for op, cases in ops.items():
        _require(op in OPS, f"it has an op {op!r}; known: {OPS}")
        defaults = importlib.import_module(f"pallas_kernels.{op}.config").DEFAULTS
        _require(isinstance(cases, dict), f"{op} is not an object")
        parsed[op] = {}
        for case, values in cases.items():
            _require(case in defaults, f"{op} has a case {case!r}; known: {sorted(defaults)}")
            names = [field.name for field in dataclasses.fields(defaults[case])]
            _require(
                isinstance(values, dict) and sorted(values) == sorted(names),
                f"{op}, {case}: its fields must be {names}",
            )
            for name, value in values.items():
                _require(
                    type(value) is int and value > 0 and value & (value - 1) == 0,
                    f"{op}, {case}: {name} = {value!r} is not a power of two",
                )
            parsed[op][case] = type(defaults[case])(**values)
    return parsed


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
