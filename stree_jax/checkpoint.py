"""Native checkpoints: a directory that describes itself.

    config.json      format version and `ModelConfig`
    params/          Orbax checkpoint of the weights
    tokenizer.json   optional, in the format of the `tokenizers` library
    README.md        optional model card

A save writes a directory of another name and renames it when it is complete, so that a checkpoint
is either whole or absent.
"""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from stree_jax.config import ModelConfig
from stree_jax.models.lm import HybridLM

FORMAT = "stree-jax"
VERSION = 1


def save_pretrained(
    model: HybridLM,
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    model_card: str | None = None,
    files: Sequence[Path] = (),
    overwrite: bool = False,
) -> None:
    """Saves a model as a native checkpoint directory.

    Args:
        model: its weights are stored in the type they have.
        path: the directory to create.
        tokenizer: stored beside the weights.
        model_card: Markdown, stored as README.md.
        files: further files to copy into the directory.
        overwrite: replace an existing directory. The old one stays until the new one is complete.

    Raises:
        ValueError: `path` exists and `overwrite` is False.
    """
    from orbax.checkpoint import v1 as ocp  # half a second; not everyone saves

    with new_directory(Path(path), overwrite) as partial:
        header = {"format": FORMAT, "version": VERSION, "model": model.config.to_dict()}
        (partial / "config.json").write_text(json.dumps(header, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(str(partial / "tokenizer.json"))
        if model_card is not None:
            (partial / "README.md").write_text(model_card)
        for file in files:
            shutil.copyfile(file, partial / file.name)
        with _quiet():
            ocp.save(partial / "params", nnx.to_pure_dict(nnx.state(model)))


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = jnp.float32,
    implementation: str | None = None,
    quirks: Collection[str] = (),
) -> HybridLM:
    """Loads a checkpoint directory: native, or of any family that `stree_jax.convert` knows.

    Args:
        path: the directory, or the name of a model on the hub (needs `stree-jax[hub]`).
        dtype: of the loaded weights, float32 or bfloat16, whatever type is stored; None: bfloat16
            if they are stored in it. Speculative decoding reproduces autoregressive decoding token
            for token in float32, the default.
        implementation: of the kernels, see `pallas_kernels.dispatch`.
        quirks: of `stree_jax.convert.QUIRKS`, to reproduce what other programs do against the
            published config.

    Raises:
        ValueError: the checkpoint is missing, damaged, of an unknown or unsupported kind, or its
            shapes disagree with its config.
    """
    from stree_jax import convert  # not needed for native checkpoints, and it imports this module

    directory = convert.find(path)
    if not convert.is_native(directory):
        checkpoint = convert.open_checkpoint(directory, quirks)
        return convert.load_model(
            checkpoint,
            dtype=checkpoint.dtype if dtype is None else dtype,
            implementation=implementation,
        )
    if quirks:
        raise ValueError(f"{directory} is native; quirks are for what other programs wrote")
    return _load_native(directory, dtype, implementation)


def _load_native(path: Path, dtype: DTypeLike | None, implementation: str | None) -> HybridLM:
    from orbax.checkpoint import v1 as ocp

    config = load_config(path)
    stored = _metadata(path)
    if dtype is None:
        dtype = matrix_dtype(jax.tree.leaves(stored))
    structure, weights = HybridLM.abstract(config, dtype=dtype, implementation=implementation)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        weights,
    )
    check_shapes(path, wanted, stored)
    try:
        with _quiet():
            loaded = ocp.load((path / "params").absolute(), wanted)
    except Exception as error:
        raise ValueError(
            f"{path} is damaged: cannot read its weights ({first_line(error)})"
        ) from error
    return nnx.merge(structure, loaded)


def load_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The config of a native checkpoint directory.

    Raises:
        ValueError: no such checkpoint, or not one of this format.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"no checkpoint at {path}: there is no such directory")
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a native checkpoint: it has no config.json")
    header = read_json(file)
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a native checkpoint: config.json does not say format = {FORMAT!r}"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} has checkpoint version {header.get('version')!r};"
            f" this stree_jax reads {VERSION}"
        )
    return ModelConfig.from_dict(header.get("model"))


def stored_dtype(path: Path) -> jnp.dtype:
    """The type of a native checkpoint's matrices: bfloat16 or float32.

    Raises:
        ValueError: it has no weights, or they are damaged.
    """
    return matrix_dtype(jax.tree.leaves(_metadata(path)))


def matrix_dtype(weights: Iterable[Any]) -> jnp.dtype:
    """bfloat16 if all matrices are of this type, else float32, which loses nothing.

    Args:
        weights: anything with a shape and a dtype.
    """
    dtypes = {jnp.dtype(weight.dtype) for weight in weights if len(weight.shape) == 2}
    return jnp.dtype(jnp.bfloat16 if dtypes == {jnp.dtype(jnp.bfloat16)} else jnp.float32)


def read_json(path: Path) -> dict:
    """A JSON object. `Infinity`, which transformers 4 writes, is understood.

    Raises:
        ValueError: the file cannot be read, or is not an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    return values


def _metadata(path: Path) -> object:
    """Names, shapes and types of the stored weights."""
    from orbax.checkpoint import v1 as ocp

    params = (path / "params").absolute()
    if not params.is_dir():
        raise ValueError(f"{path} has no weights: the directory 'params' is missing")
    try:
        with _quiet():
            return ocp.metadata(params).metadata
    except Exception as error:
        raise ValueError(
            f"{path} is damaged: cannot read its weights ({first_line(error)})"
        ) from error


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint directory, or in a file of the same format.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    file = Path(path)
    if file.suffix != ".json":
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"no tokenizer at {file}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file} is damaged: {first_line(error)}") from error


def demo_path(name: str) -> Path:
    """The directory of a small trained model that ships with the package: "target" or "draft".

    Raises:
        ValueError: another name.
    """
    known = ("target", "draft")
    if name not in known:
        raise ValueError(f"the embedded models are {known}, got {name!r}")
    return Path(__file__).parent / "demo" / name


def check_shapes(path: Path, wanted: object, stored: object) -> None:
    """Compares names and shapes of two trees of weights.

    To be asked before Orbax, whose own complaint leaves threads behind that report to a closed
    event loop.

    Raises:
        ValueError: everything that is wrong.
    """
    want, have = (
        {name: tuple(leaf.shape) for name, leaf in flatten(tree).items()}
        for tree in (wanted, stored)
    )
    problems = [f"{name} {want[name]} is missing" for name in sorted(want.keys() - have.keys())]
    problems += [
        f"{name} {have[name]} is not expected" for name in sorted(have.keys() - want.keys())
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


def flatten(tree: object) -> dict[str, Any]:
    """Leaves by their path, joined with dots."""
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in where): leaf
        for where, leaf in jax.tree.leaves_with_path(tree)
    }


@contextlib.contextmanager
def new_directory(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """A directory that takes the name `path` if the block ends well, and else vanishes.

    Raises:
        ValueError: `path` exists and `overwrite` is False.
    """
    path = path.absolute()
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; choose another name or pass overwrite=True")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        new = work / "new"
        new.mkdir()
        yield new
        if path.exists():
            if not overwrite:
                raise ValueError(f"{path} appeared in the meantime; choose another name")
            path.rename(work / "old")
        new.rename(path)
    except BaseException:
        if (work / "old").exists() and not path.exists():
            (work / "old").rename(path)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax's progress messages out of the user's terminal."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def first_line(error: BaseException) -> str:
    """The first line of an error, shortened."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 200 else text[:200] + "..."
