"""Native checkpoints: saving, loading, and the checks that other formats share.

    config.json      format version and `ModelConfig`
    params/          Orbax checkpoint of the weights
    checksums.json   CRC-32 of each array; checkpoints without it load too
    tokenizer.json   optional, in the format of the `tokenizers` library
    README.md        optional model card

Other modules, such as heads of a model, are stored in the same way: config.json then has a `kind`,
and `write_checkpoint`, `load_header` and `load_module` are the building blocks.

A checkpoint is either complete or absent, see `stree_jax.directories`. Loading a checkpoint of any
format is `stree_jax.pretrained`.
"""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from stree_jax.config import ModelConfig
from stree_jax.directories import new_directory, recover
from stree_jax.files import has_directory, has_file
from stree_jax.mesh.hosts import by_first
from stree_jax.mesh.partition import ONE_DEVICE, Partition
from stree_jax.mesh.weights import as_weight, canonical_weights, spread
from stree_jax.messages import printable, shown, shown_path
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.models.matrices import in_first
from stree_jax.names import flatten, unflatten
from stree_jax.stored import (
    CHECKSUMS,
    Tensor,
    check_crc,
    check_sizes,
    open_arrays,
    write_checksums,
)

# What an extension may use.
__all__ = [
    "is_native",
    "load_config",
    "load_header",
    "load_module",
    "save_pretrained",
    "write_checkpoint",
]

FORMAT = "stree-jax"
VERSION = 2
READABLE = (1, 2)  # 1 stores one config for all layers of a kind
# Where transformers has chat templates, and where older versions of this library looked for them.
CHAT_TEMPLATES = (
    "chat_template.jinja",
    "chat_templates/*.jinja",
    "additional_chat_templates/*.jinja",
)
_Module = TypeVar("_Module", bound=nnx.Module)
_MAX_TEXT = 16 << 20  # bytes; an index of 100,000 tensors has about 10 MB
_MAX_DEPTH = 32
_SMALL = 1 << 22  # numbers that numpy checks as fast as a program does
# A function (name, canonical values, dtype) -> weight.
Place = Callable[[str, np.ndarray, DTypeLike], jax.Array]


def save_pretrained(
    model: HybridLM,
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    model_card: str | None = None,
    files: Sequence[Path] = (),
    overwrite: bool = False,
) -> None:
    """Saves a model as a native checkpoint directory, independent of the model's mesh.

    All processes call this with the same arguments. Process 0 writes, and all return when the
    checkpoint is complete.

    Args:
        model: the model; weights are stored in their current dtype. Process 0 holds all weights of
            a model on a mesh.
        path: the directory to create, on a file system that all processes share.
        tokenizer: tokenizer to store as tokenizer.json.
        model_card: Markdown to store as README.md.
        files: more files to copy into the directory.
        overwrite: replace an existing directory. The old one stays until the new one is complete.

    Raises:
        ValueError: `path` is not a path, or exists and `overwrite` is False; or `model` is not a
            model.
    """
    check_model(model)
    header = {"model": model.config.to_dict()}

    def more_files(partial: Path) -> None:
        if tokenizer is not None:
            tokenizer.save(str(partial / "tokenizer.json"))
        for file in files:
            shutil.copyfile(file, partial / file.name)

    write_checkpoint(path, header, model, model_card, overwrite, more_files)


def write_checkpoint(
    path: str | os.PathLike[str],
    header: dict[str, Any],
    weights: nnx.Module,
    model_card: str | None,
    overwrite: bool,
    more_files: Callable[[Path], None] | None = None,
) -> None:
    """Writes a directory with config.json, weights, model card and `more_files`.

    All processes call this, and process 0 writes.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path must be the directory to create, got {shown(path)}")
    from orbax.checkpoint import v1 as ocp  # takes half a second to import

    with contextlib.ExitStack() as stack:

        def begin() -> str:
            partial = stack.enter_context(new_directory(Path(path), overwrite))
            full_header = {"format": FORMAT, "version": VERSION} | header
            (partial / "config.json").write_text(json.dumps(full_header, indent=2) + "\n")
            if model_card is not None:
                (partial / "README.md").write_text(model_card)
            if more_files is not None:
                more_files(partial)
            return str(partial)

        partial = Path(by_first(begin))
        arrays = _canonical_arrays(weights)
        with _quiet():
            ocp.save(partial / "params", arrays)  # all processes must call it

        def end() -> str:
            write_checksums(partial, flatten(arrays))
            stack.close()  # renames the directory
            return ""

        by_first(end)


def _canonical_arrays(weights: nnx.Module) -> dict[str, Any]:
    """The arrays to store. Only process 0 keeps their values."""

    def kept(values: np.ndarray) -> np.ndarray:
        if jax.process_index() == 0:
            return values
        return np.broadcast_to(np.zeros((), values.dtype), values.shape)  # takes no memory

    arrays = nnx.to_pure_dict(nnx.state(in_first(weights)))
    if isinstance(weights, HybridLM) and weights.partition != ONE_DEVICE:
        whole = {name: kept(read()) for name, read in canonical_weights(weights).items()}
        return unflatten(whole, arrays)
    if jax.process_count() > 1:  # Orbax refuses arrays of one process's devices
        return jax.tree.map(lambda array: kept(np.asarray(array)), arrays)
    return arrays


def is_native(path: Path) -> bool:
    """Whether a directory is a native checkpoint: its config.json has a `format`."""
    file = path / "config.json"
    return has_file(file) and "format" in read_json(file)


def load_native(
    path: Path,
    *,
    dtype: DTypeLike | None,
    implementation: str | None = None,
    partition: Partition = ONE_DEVICE,
) -> HybridLM:
    """Loads a native checkpoint directory.

    Args:
        path: the directory.
        dtype: dtype of the weights, float32 or bfloat16; None means as stored.
        implementation: kernel implementation, see `pallas_kernels.dispatch`.
        partition: partition of the loaded model.

    Raises:
        ValueError: the checkpoint is missing or damaged, its shapes disagree with its config, or
            do not fit the partition.
    """
    config, stored, crcs = open_native(path)
    if dtype is None:
        dtype = matrix_dtype(stored.values())
    structure, wanted = HybridLM.abstract(
        config, dtype=dtype, implementation=implementation, partition=partition
    )
    place = placer(config, partition)
    return nnx.merge(structure, read_weights(path, wanted, stored, crcs, place))


def placer(config: ModelConfig, partition: Partition = ONE_DEVICE) -> Place:
    """A function that puts a weight on its devices."""
    table = config.cuts(partition.shards)
    return lambda name, values, dtype: spread(values, table.get(name), partition, dtype)


def _here(name: str, values: np.ndarray, dtype: DTypeLike) -> jax.Array:
    return as_weight(values, dtype)


def read_weights(
    path: Path,
    wanted: dict[str, Any],
    stored: dict[str, Tensor],
    crcs: dict[str, int],
    place: Place = _here,
) -> dict[str, Any]:
    """The stored arrays in the structure and the dtypes of `wanted`, one at a time.

    `place` puts each on its devices, by default on the default device.
    """
    loaded = {}
    for name, leaf in flatten(wanted).items():
        try:
            values = stored[name].read()
            check_crc(values, crcs.get(name))
        except Exception as error:
            raise ValueError(
                f"{path} is damaged: cannot read {name} ({first_line(error)})"
            ) from error
        loaded[name] = place(name, values, leaf.dtype)
        if not is_finite(name, loaded[name]):
            raise ValueError(
                f"{path}: {name} holds NaN, infinity or a number too large for {leaf.dtype.name}"
            )
    return unflatten(loaded, wanted)


def load_module(path: Path, like: _Module) -> _Module:
    """Loads the weights of a checkpoint that `write_checkpoint` made of a module.

    Args:
        path: the directory.
        like: a module of the same structure, shapes and dtypes; may be abstract.

    Raises:
        ValueError: the weights are missing or damaged, or have other shapes.
    """
    structure, state = nnx.split(like)
    wanted = nnx.to_pure_dict(state)
    stored, sums = open_weights(path)
    crcs = check_weights(path, wanted, stored, sums)
    return nnx.merge(structure, read_weights(path, wanted, stored, crcs))


def open_native(path: Path) -> tuple[ModelConfig, dict[str, Tensor], dict[str, int]]:
    """Opens a native checkpoint directory and checks names, shapes and types; reads no weights.

    Returns:
        The config, the arrays by name, and their checksums, empty in an older checkpoint.

    Raises:
        ValueError: the checkpoint is missing or damaged, or its shapes disagree with its config.
    """
    config = load_config(path)
    stored, sums = open_weights(path)
    if len(config.layers) > len(stored):  # each layer has at least one array
        raise ValueError(
            f"{path} is damaged: config.json says {len(config.layers)} layers, but there are only"
            f" {len(stored)} arrays"
        )
    crcs = check_weights(path, HybridLM.abstract(config)[1], stored, sums)
    return config, stored, crcs


def open_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The arrays of a checkpoint by name, and the content of its checksum file, if it has one."""
    params = path / "params"
    if not params.is_dir():
        raise ValueError(f"{path} has no weights: the directory 'params' is missing")
    sums = read_json(path / CHECKSUMS) if has_file(path / CHECKSUMS) else None
    has_file(params / "state" / "_METADATA")  # says what lies there instead
    try:
        check_sizes(params, {} if sums is None else sums.get("sizes", {}))
        return open_arrays(params, read_json(params / "state" / "_METADATA")), sums
    except Exception as error:
        raise ValueError(
            f"{path} is damaged: cannot read its weights ({first_line(error)})"
        ) from error


def check_weights(
    path: Path, wanted: dict[str, Any], stored: dict[str, Tensor], sums: dict[str, Any] | None
) -> dict[str, int]:
    """Checks names, shapes and types, and returns the checksums by name."""
    check_shapes(path, wanted, stored)
    wrong = [f"{name} holds {a.dtype}" for name, a in stored.items() if a.dtype.kind not in "fV"]
    if wrong:
        raise ValueError(f"{path} is damaged: {'; '.join(wrong)[:200]}, not real numbers")
    if sums is None:
        return {}
    crcs = sums.get("crc32")
    if not (
        isinstance(crcs, dict)
        and crcs.keys() == stored.keys()
        and all(type(crc) is int for crc in crcs.values())
    ):
        raise ValueError(f"{path / CHECKSUMS} is damaged: it is not about the weights here")
    return crcs


def load_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The config of a native checkpoint directory.

    Raises:
        ValueError: there is no such checkpoint, or it has another format or version.
    """
    path, header = load_header(path)
    if (kind := header.get("kind")) is not None:
        raise ValueError(
            f"{path} holds a checkpoint of kind {shown(kind)} and no model; load it with what saved"
            " it: Medusa heads, 'medusa', with load_medusa or generate --medusa, and a"
            " multi-token prediction head, 'mtp', with load_mtp or generate --mtp-head"
        )
    try:
        return ModelConfig.from_dict(header.get("model"))
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None


def load_header(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The content of config.json, of a known version, and the path as a `Path`."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path must be the directory of a checkpoint, got {shown(path)}")
    path = Path(path)
    recover(path)
    if not has_directory(path):
        raise ValueError(f"no checkpoint at {shown_path(path)}: there is no such directory")
    file = path / "config.json"
    if not has_file(file):
        raise ValueError(f"{path} is not a native checkpoint: it has no config.json")
    header = read_json(file)
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a native checkpoint: config.json does not say format = {FORMAT!r}"
        )
    version = header.get("version")
    if type(version) is not int or version not in READABLE:
        raise ValueError(
            f"{path} has checkpoint version {version!r:.80};"
            f" this stree_jax reads {' and '.join(map(str, READABLE))}"
        )
    return path, header


def matrix_dtype(weights: Iterable[Any]) -> jnp.dtype:
    """bfloat16 if all matrices are bfloat16, else float32, which is lossless.

    Args:
        weights: objects with a `shape` and a `dtype`.
    """
    dtypes = {jnp.dtype(weight.dtype) for weight in weights if len(weight.shape) == 2}
    return jnp.dtype(jnp.bfloat16 if dtypes == {jnp.dtype(jnp.bfloat16)} else jnp.float32)


def read_json(path: Path) -> dict:
    """Reads a JSON object. Accepts `Infinity`, which transformers 4 writes.

    Raises:
        ValueError: the file cannot be read, is too large or too deep to be real, or does not hold
            an object.
    """
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    level: list[Any] = [values]
    for _ in range(_MAX_DEPTH):
        tables = [part.values() if isinstance(part, dict) else part for part in level]
        level = [part for table in tables for part in table if isinstance(part, dict | list)]
    if level:
        raise ValueError(f"{path} is damaged: it is nested more than {_MAX_DEPTH} deep")
    return values


def optional_json(path: Path) -> dict:
    """`read_json`; empty where there is no file."""
    return read_json(path) if has_file(path) else {}


def read_text(path: Path) -> str:
    """Reads a text.

    Raises:
        ValueError: the file cannot be read, is no file, or is too large to be real.
    """
    has_file(path)  # says what lies there instead
    try:
        if (size := path.stat().st_size) > _MAX_TEXT:
            raise ValueError(f"{size} bytes are too many for a config or an index")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{shown_path(path)} is damaged: {first_line(error)}") from error


def check_shapes(path: Path, wanted: object, stored: object) -> None:
    """Compares names and shapes of two trees of weights.

    Args:
        path: the checkpoint, for the message.
        wanted, stored: trees of objects with a `shape`.

    Raises:
        ValueError: lists all differences.
    """
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
        shown = "; ".join(problems[:5]) + (
            f"; and {len(problems) - 5} more" if problems[5:] else ""
        )
        raise ValueError(f"the weights of {path} disagree with its config: {shown}")


def is_finite(name: str, weight: jax.Array) -> bool:
    """Whether all values of a weight are finite, and for an `A_log` the decay rates too."""
    decays = name.endswith("A_log")
    if weight.size <= _SMALL and _is_on_host(weight):  # a program for each shape takes longer
        values = np.asarray(weight)
        with np.errstate(over="ignore"):
            finite = np.isfinite(values).all()
            return bool(finite and (not decays or np.isfinite(np.exp(values)).all()))
    return bool(_all_finite(weight, decays=decays))


def _is_on_host(weight: jax.Array) -> bool:
    devices: Any = weight.sharding.device_set
    return weight.is_fully_addressable and all(each.platform == "cpu" for each in devices)


@functools.partial(jax.jit, static_argnames="decays")
def _all_finite(weight: jax.Array, *, decays: bool) -> jax.Array:
    finite = jnp.isfinite(weight).all()
    return finite & jnp.isfinite(jnp.exp(weight)).all() if decays else finite


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences what Orbax logs."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # errors of its threads are raised here as well
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def tokenizer_errors(message: str) -> Iterator[None]:
    """Errors of the tokenizers package, panics included, become a ValueError with this message."""
    try:
        yield
    except BaseException as error:  # it raises plain Exception; a panic of Rust is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error message, at most 200 characters and without addresses."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:10_000]
    text = re.sub(r"( See [^<]*)?<[^<>]* at 0x[^<>]*>|(?<= )at 0x[0-9a-f]+", "", text)
    text = printable(text)
    return text if len(text) <= 200 else text[:200] + "..."
