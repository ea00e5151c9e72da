"""Loading a model, a head or a tokenizer from any checkpoint. Depends on `stree_jax.convert`."""

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from pallas_kernels import dispatch
from stree_jax.checkpoint.files import checked_path, folder_of, has_file
from stree_jax.heads import head_kind, load_native_head, part_of
from stree_jax.mesh.partition import ONE_DEVICE, partition_of
from stree_jax.messages import first_line, shown, shown_path
from stree_jax.models.lm import HybridLM, check_on_one_device, check_options
from stree_jax.models.matrices import check_quantize, loaded_for, pack
from stree_jax.special_tokens import end_tokens, special_tokens


@jax.transfer_guard("allow")
def from_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = jnp.float32,
    implementation: str | None = None,
    quirks: Collection[str] = (),
    ignore: Collection[str] | Any = (),
    adapter: str | os.PathLike[str] | Any = None,
    mesh: Mesh | None = None,
    replicate: bool = False,
    quantize: str | Any = None,
    keep: Collection[str] | Any = (),
) -> HybridLM:
    """Loads a checkpoint: native, or of any family in `stree_jax.convert.FAMILIES`.

    `eos_token` of its config has all tokens that end its texts: those that the checkpoint's config,
    its `generation_config.json` and its tokenizer name.

    Args:
        path: the directory, a GGUF file with config.json beside it (needs the extra `gguf`), or
            the name of a model on the hub (needs the extra `hub`).
        dtype: dtype of the loaded weights, float32 or bfloat16. None means bfloat16 if the
            checkpoint stores bfloat16, else float32. Speculative decoding reproduces autoregressive
            decoding token for token in float32, the default, and on a CPU in bfloat16 too.
        implementation: kernel implementation, see `pallas_kernels.dispatch`.
        quirks: names from `stree_jax.convert.QUIRKS`: deviations of other programs from the
            published config, to reproduce them.
        ignore: names of unknown config fields that do not change what is computed, such as
            "unsloth_fixed"; without it they are refused. Each must be there, and left over: a field
            that is read cannot be ignored.
        adapter: a LoRA adapter in PEFT's format to merge into the weights, in float32: a directory
            or the name of one on the hub. For checkpoints of other programs.
        mesh: a mesh from `make_mesh`: each of its devices gets its shard of the model. This host
            holds one weight at a time, and the shards of its own devices.
        replicate: give every device of the mesh the whole model, as draft models need it.
        quantize: "int8" or "int4": matrices get 8 or 4 bits a weight and a scale for 32 inputs of a
            column, made of the values in the file; norms, convolutions and routers stay. That is
            another model: speculative decoding gives its text, which may differ from the
            original's. With "int4" the embedding and the output head have 8 bits, unless
            "int4:embedding,head" names them, and so has a matrix whose inputs are not a multiple
            of 32. None: what the checkpoint has.
        keep: names of matrices that stay too, such as "embedding", or patterns of names with stars;
            `inspect --tensors` lists the names.

    Raises:
        ValueError: the checkpoint is missing, damaged, unknown or unsupported, its shapes disagree
            with its config or do not fit the mesh, or an argument has a wrong type or value.
    """
    check_options(jnp.float32 if dtype is None else dtype, implementation)
    if replicate and mesh is None:
        raise ValueError("replicate = True is for a model on a mesh: pass mesh=make_mesh(...)")
    check_quantize(quantize, keep)
    partition = partition_of(mesh, replicate)
    import stree_jax.convert as convert  # not imported by `import stree_jax`, to keep that light

    checkpoint = convert.open_checkpoint(path, quirks, ignore, adapter)
    model = convert.load_model(
        checkpoint,
        dtype=dtype,
        implementation=implementation,
        partition=partition,
        quantize=quantize,
        keep=keep,
    )
    ends = _end_tokens(model, folder_of(checkpoint.path))
    model.config = dataclasses.replace(model.config, eos_token=ends)
    if partition == ONE_DEVICE and dispatch.device_of(model).platform == "cpu":
        pack(model)
    return model


@jax.transfer_guard("allow")
def load_draft(
    path: str | os.PathLike[str],
    target: HybridLM,
    *,
    ignore: Collection[str] | Any = (),
    quantize: str | Any = None,
) -> HybridLM:
    """Loads a draft model as fits its target: on the target's mesh, on a CPU in bfloat16.

    There half the bytes make it faster, and whatever a draft computes the text is the target's.
    Other arguments and errors are those of `from_pretrained`; of a draft that keeps some matrices
    in few bits, `convert` one with `keep`.
    """
    mesh, dtype = target.partition.mesh, draft_dtype(target)
    return from_pretrained(
        path, dtype=dtype, ignore=ignore, mesh=mesh, replicate=mesh is not None, quantize=quantize
    )


@jax.transfer_guard("allow")
def load_head(
    kind: str | Any,
    path: str | os.PathLike[str] | Any,
    target: HybridLM | Any,
    *,
    ignore: Collection[str] | Any = (),
    quantize: str | Any = None,
) -> Any:
    """Loads a head on a model's hidden states, in the model's dtype.

    Args:
        kind: one of `stree_jax.heads.HEADS`: "medusa", "mtp", "eagle3" or "dflash".
        path: the head's directory, or that of a target which has its head in a folder named as the
            kind. What `save_head` or a command of training wrote; of kinds that others publish also
            their files, and names on the hub.
        target: the model that it is for, on one device.
        ignore: names of unknown config fields to ignore, see `from_pretrained`.
        quantize: "int8" or "int4": its matrices get so many bits; None: what the checkpoint has.

    Raises:
        ValueError: the checkpoint is missing, damaged, unsupported or of another kind, or the head
            belongs to another target.
    """
    known = head_kind(kind)
    check_on_one_device(target, f"load_{kind}")
    check_quantize(quantize)
    if known.is_published:
        import stree_jax.convert as convert  # takes time to import

        path = convert.find(path)
        if convert.is_foreign(path, ignore=ignore):
            head = part_of(kind, "conversion").load(path, target, ignore)
            return loaded_for(target, head, quantize)
        path = path / kind if (path / kind).is_dir() else path
    return loaded_for(target, load_native_head(kind, path, target), quantize)


def draft_dtype(target: HybridLM) -> DTypeLike:
    """The dtype in which a draft for a target is loaded."""
    return jnp.dtype(jnp.bfloat16 if target.output_head.storage.is_packed else target.dtype)


def _end_tokens(model: HybridLM, directory: Path) -> int | tuple[int, ...] | None:
    """The tokens that end its texts; one or none as other configs have it."""
    has_name = "eos_token" in special_tokens(directory)
    is_there = has_name and has_file(directory / "tokenizer.json")
    ends = end_tokens(model.config, directory, load_tokenizer(directory) if is_there else None)
    return tuple(ends) if len(ends) > 1 else ends[0] if ends else None


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint directory, or of a tokenizer.json file.

    It encodes whole texts: what its last user left there of truncation and padding is off. For a
    name on the hub pass `stree_jax.convert.find(name)`.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    file = folder_of(checked_path(path, "path", "a directory or a tokenizer.json"))
    if file.suffix != ".json" and not os.path.isfile(file):
        file = file / "tokenizer.json"
    if file.suffix != ".json" or not has_file(file):
        raise ValueError(
            f"no tokenizer at {shown_path(file)}: only a tokenizer.json is read; of other files"
            " transformers makes one, AutoTokenizer.from_pretrained(DIR).save_pretrained(OUT)"
        )
    with tokenizer_errors(f"{file} is damaged"):
        tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def tokenizer_errors(message: str) -> Iterator[None]:
    """Errors of the tokenizers package, panics included, become a ValueError with this message."""
    try:
        yield
    except BaseException as error:  # it raises plain Exception; a panic of Rust is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {first_line(error)}") from error


def demo_path(name: str) -> Path:
    """The directory of a small trained model that ships: "target", "draft" or "medusa" (heads)."""
    known = ("target", "draft", "medusa")
    if name not in known:
        raise ValueError(f"the embedded models are {known}, got {shown(name)}")
    return Path(__file__).parent / "demo" / name
