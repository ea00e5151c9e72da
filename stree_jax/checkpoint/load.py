"""Loading native checkpoints, and the checks of weights that other formats share."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.matmul import KINDS, QuantizedMatrix
from stree_jax.checkpoint.arrays import Tensor, open_arrays
from stree_jax.checkpoint.directories import recover
from stree_jax.checkpoint.files import checked_path, has_directory, has_file, read_json
from stree_jax.mesh.partition import ONE_DEVICE, Cut, Partition
from stree_jax.mesh.weights import spread
from stree_jax.messages import first_line, shown, shown_path
from stree_jax.models.config import ModelConfig
from stree_jax.models.lm import HybridLM
from stree_jax.models.matrices import quantize_named
from stree_jax.names import flatten, unflatten

FORMAT = "stree-jax"
VERSION = 2
QUANTIZED_VERSIONS = {"int8": 3, "int4": 4}  # with such matrices
READABLE = (1, 2, 3, 4)  # 1 stores one config for all layers of a kind
_Module = TypeVar("_Module", bound=nnx.Module)
_NOT_NATIVE = f"is not a native checkpoint: config.json does not say format = {FORMAT!r}"
_SMALL = 1 << 22  # numbers that numpy checks as fast as a program does
# A function (name, canonical values, an abstract weight, sources for messages) -> such a weight.
Place = Callable[[str, Any, Any, str], Any]


def native_header(path: Path) -> dict[str, Any] | None:
    """The content of a native checkpoint's config.json; None: a directory is none.

    Raises:
        ValueError: it has an unknown `format` or version.
    """
    file = path / "config.json"
    header = read_json(file) if has_file(file) else {}
    if "format" not in header:
        return None
    if header["format"] != FORMAT:
        raise ValueError(f"{path} {_NOT_NATIVE}")
    version = header.get("version")
    if type(version) is not int or version not in READABLE:
        raise ValueError(
            f"{path} has checkpoint version {version!r:.80};"
            f" this stree_jax reads {' and '.join(map(str, READABLE))}"
        )
    return header


def is_native(path: Path) -> bool:
    """True if a directory is a native checkpoint: its config.json has a `format`."""
    return native_header(path) is not None


def load_module(path: Path, like: _Module) -> _Module:
    """The module like another, perhaps abstract, that `write_checkpoint` wrote.

    Raises:
        ValueError: the weights are missing or damaged, or have other shapes.
    """
    stored = open_arrays(path)
    try:
        quantize_named(like, quantized_in(stored))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    structure, state = nnx.split(like)
    wanted = nnx.to_pure_dict(state)
    _check_weights(path, wanted, stored)
    place, leaves = placer(path, {}), flatten(wanted)
    loaded = {
        name: place(name, read_values(path, name, stored[name], leaf), leaf, name)
        for name, leaf in leaves.items()
    }
    return nnx.merge(structure, unflatten(loaded, wanted))


def open_native(path: Path, header: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and the arrays by name of a header's model, which fit; reads no weights."""
    config, stored = _config_of(path, header), open_arrays(path)
    if len(config.layers) > len(stored):  # each layer has at least one array
        raise ValueError(
            f"{path} is damaged: config.json says {len(config.layers)} layers, but there are only"
            f" {len(stored)} arrays"
        )
    try:
        wanted = HybridLM.abstract(config, quantized=quantized_in(stored))[1]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    _check_weights(path, wanted, stored)
    return config, stored


def quantized_in(stored: Mapping[str, Tensor]) -> dict[str, str]:
    """The kinds of the matrices in few bits, by name."""
    return {name: x.dtype.name for name, x in stored.items() if x.scales is not None}


def _check_weights(path: Path, wanted: dict[str, Any], stored: dict[str, Tensor]) -> None:
    check_shapes(path, wanted, stored)
    dtypes = {name: array.dtype for name, array in stored.items() if array.scales is None}
    wrong = [f"{name} holds {dtype}" for name, dtype in dtypes.items() if dtype.kind not in "fV"]
    if wrong:
        raise ValueError(f"{path} is damaged: {'; '.join(wrong)[:200]}, not real numbers")
    for name, leaf in flatten(wanted).items():
        scales = stored[name].scales
        if scales is not None and scales.shape != leaf.scales.shape:
            raise ValueError(
                f"{path} is damaged: {name} has scales {scales.shape}, not {leaf.scales.shape}"
            )


def read_values(path: Path, name: str, tensor: Tensor, wanted: Any) -> Any:
    """A stored array, or the matrix in few bits; ValueError: it cannot be read."""
    try:
        if tensor.scales is None:
            return tensor.read()
        return QuantizedMatrix(tensor.read(), tensor.scales.read(), wanted.axis)
    except Exception as error:
        raise ValueError(f"{path} is damaged: cannot read {name} ({first_line(error)})") from error


def placer(path: Path, cuts: Mapping[str, Cut], partition: Partition = ONE_DEVICE) -> Place:
    """A function that puts a weight on its devices, in few bits if that is wanted.

    It raises a ValueError for a weight that is not finite.
    """

    @np.errstate(all="ignore")  # what is not finite is refused by name
    def place(name: str, values: Any, wanted: Any, sources: str) -> Any:
        if isinstance(wanted, QuantizedMatrix) and not isinstance(values, QuantizedMatrix):
            values = QuantizedMatrix.of(values, wanted.axis, wanted.kind)
        weight = spread(name, values, cuts, partition, wanted.dtype)
        if not is_finite(name, weight):
            raise ValueError(
                f"{path}: {sources} holds NaN, infinity or a number too large for"
                f" {wanted.dtype.name}"
            )
        return weight

    return place


def load_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The config of a native checkpoint; ValueError: there is none that can be read."""
    return _config_of(*load_header(path))


def _config_of(path: Path, header: Mapping[str, Any]) -> ModelConfig:
    if (kind := header.get("kind")) is not None:
        raise ValueError(
            f"{path} holds a checkpoint of kind {shown(kind)} and no model; load_head(kind, path,"
            " target) loads heads, and the options of `generate` draft with them"
        )
    try:
        return ModelConfig.from_dict(header.get("model"))
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None


def load_header(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The content of config.json, of a known version, and the path as a `Path`."""
    path = checked_path(path, "path", "the directory of a checkpoint")
    recover(path)
    if not has_directory(path):
        raise ValueError(f"no checkpoint at {shown_path(path)}: there is no such directory")
    if not has_file(path / "config.json"):
        raise ValueError(f"{path} is not a native checkpoint: it has no config.json")
    header = native_header(path)
    if header is None:
        raise ValueError(f"{path} {_NOT_NATIVE}")
    return path, header


def matrix_dtype(weights: Iterable[Any]) -> jnp.dtype:
    """bfloat16 if all matrices that have a float type are bfloat16, else float32: lossless."""
    dtypes = {jnp.dtype(weight.dtype) for weight in weights if len(weight.shape) == 2}
    dtypes -= {*map(jnp.dtype, KINDS)}
    return jnp.dtype(jnp.bfloat16 if dtypes == {jnp.dtype(jnp.bfloat16)} else jnp.float32)


def check_shapes(path: Path, wanted: object, stored: object) -> None:
    """Compares names and shapes of two trees of weights; raises ValueError with all differences."""
    want, have = (
        {name: tuple(leaf.shape) for name, leaf in flatten(tree).items()}
        for tree in (wanted, stored)
    )
    problems = [f"{name} {want[name]} is missing" for name in sorted(want.keys() - have.keys())]
    problems += [
        f"{name:.80} {have[name]} is not expected" for name in sorted(have.keys() - want.keys())
    ]
    problems += [
        f"{name} is {have[name]}, the config says {want[name]}"
        for name in sorted(want.keys() & have.keys())
        if want[name] != have[name]
    ]
    if problems:
        listed = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if problems[5:] else ""
        raise ValueError(f"the weights of {path} disagree with its config: {listed}{more}")


def is_finite(name: str, weight: Any) -> bool:
    """True if a weight is finite, and for an `A_log` the decay rates too."""
    if isinstance(weight, QuantizedMatrix):  # its largest values
        weight = weight.scales.astype(jnp.float32) * 127
    decays = name.endswith("A_log")
    platforms = {device.platform for device in weight.sharding.device_set}
    is_on_host = weight.is_fully_addressable and platforms == {"cpu"}
    if is_on_host and weight.size <= _SMALL:  # a program for each shape takes longer
        return bool(_all_finite(np, np.asarray(weight), decays))
    return bool(_program(jnp, weight, decays))


def _all_finite(library: Any, values: Any, decays: bool) -> Any:
    finite = library.isfinite(values).all()
    return finite & library.isfinite(library.exp(values)).all() if decays else finite


_program = jax.jit(_all_finite, static_argnums=(0, 2))
