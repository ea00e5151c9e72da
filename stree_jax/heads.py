"""Heads on a model's hidden states: the table of their kinds, and native checkpoints of them.

A kind of head is a room: a package of `extensions` with its weights, its drafter, its published
files (`conversion.py`) and its training (`training.py`). What the library needs to know of it is
its `KIND`, and before the room is imported its line of `HEADS`. A new kind is these two.

A native checkpoint of a head is for one target, and for the same in few bits. Its config.json has
the `kind`, the head's config and identities of the target's weights; the other files are those of
`stree_jax.checkpoint`.
"""

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax.checkpoint import load_header, write_checkpoint
from stree_jax.checkpoint.load import load_module
from stree_jax.checks import require
from stree_jax.messages import shown
from stree_jax.models.identity import identity_of
from stree_jax.models.lm import HybridLM, check_on_one_device
from stree_jax.models.matrices import named_weights, quantized_kinds

# What an extension may use.
__all__ = [
    "HEADS",
    "ROOMS",
    "HeadKind",
    "Room",
    "abstract_head",
    "check_fits",
    "check_head",
    "save_head",
]


class Room(NamedTuple):
    """A kind of head, before its room is imported.

    Attributes:
        module: the package, or a module with its `KIND`.
        names: those of `stree_jax` that it has.
        title: what tables call drafts of such heads.
        option: help of the commands' option that drafts with one, `--KIND`.
        own: help of the flag `--KIND`, if a target's checkpoint may have one; then the option is
            `--KIND-head`.
        training: the command that trains one, and what it trains; None: nothing does.
        architectures: parts of names in other programs' config.json, of files of a head alone.
    """

    module: str
    names: tuple[str, ...] = ()
    title: str = ""
    option: str = ""
    own: str = ""
    training: tuple[str, str] | None = None
    architectures: tuple[str, ...] = ()

    def is_named(self, architecture: Any) -> bool:
        """True of an architecture of config.json that such files have."""
        return any(part in str(architecture) for part in self.architectures)


# The room of each kind, by the `kind` of config.json.
HEADS = {
    "medusa": Room(
        "stree_jax.extensions.medusa",
        names=("MedusaDrafter", "MedusaHeads", "load_medusa", "save_medusa"),
        title="Medusa",
        option="Medusa heads of the target: checkpoint directory.",
        training=("medusa", "Medusa heads"),
    ),
    "mtp": Room(
        "stree_jax.extensions.mtp",
        names=("MtpConfig", "MtpDrafter", "MtpHead", "MtpModel", "load_mtp", "save_mtp"),
        title="multi-token prediction",
        option="The same, with a head that is not in the checkpoint.",
        own="Draft with the target's multi-token prediction head.",
        training=("train-mtp", "a multi-token prediction head"),
    ),
    "eagle3": Room(
        "stree_jax.extensions.eagle3",
        names=("Eagle3Config", "Eagle3Drafter", "Eagle3Head", "Eagle3Model", "load_eagle3"),
        title="EAGLE-3",
        option="EAGLE-3 head for the target: directory or hub name.",
        architectures=("Eagle3",),
    ),
    "dflash": Room(
        "stree_jax.extensions.dflash",
        names=("DFlashConfig", "DFlashDrafter", "DFlashHead", "DFlashModel", "load_dflash"),
        title="DFlash",
        option="DFlash or DSpark head for the target: directory or hub name.",
        training=("train-dflash", "a DFlash head"),
        architectures=("DFlashDraftModel", "DFlash2DraftModel", "DSparkModel", "DSparkDraftModel"),
    ),
}
# Names that `train_heads` takes beside: a kind, and other defaults of its [model] table.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash2": ("dflash", {"conv_width": 2, "markov_rank": 256, "candidates": 16}),
}
ROOMS = HEADS  # the older name of the same table
FOLDER = "mtp"  # the kind that `convert` carries, in a folder of this name in a target's checkpoint
# What config.json says of the target: which weights it has, and which beside its matrices.
IDENTITY, IDENTITY_BUT_MATRICES = "target_identity", "target_identity_but_matrices"


def _identity(target: HybridLM, *, matrices: bool = True) -> str:
    """That of the weights, or of all but the matrices; the same in any storage and dtype."""
    weights = named_weights(target, matrices=matrices)
    return identity_of((name, values.astype(jnp.bfloat16)) for name, values in weights)


@dataclasses.dataclass(frozen=True)
class HeadKind:
    """Describes a kind of head: weights, config and messages.

    Attributes:
        head: the class of its weights.
        written: what config.json says of a head.
        config: the config of a head from what config.json says; ValueError: it is damaged.
        new: an untrained head of a config. With a target in its dtype, with its kernels.
        drafts: makes of a target and its head a draft model (a `HeadModel`), or a drafter.
        missing: what is said of a native checkpoint that has none.
        misfit: what is said of a native checkpoint that is for another target.
        is_published: whether there are heads in other programs' files: `conversion.load` reads one.
    """

    head: type[nnx.Module]
    written: Callable[[Any], dict[str, Any]]
    config: Callable[[dict[str, Any]], Any]
    new: Callable[[Any, Any], nnx.Module]
    drafts: type[Any]
    missing: str
    misfit: str
    is_published: bool = True


def head_kind(kind: str) -> HeadKind:
    """Returns a kind of head by its name."""
    require(kind in HEADS, f"the kinds of heads are {', '.join(HEADS)}, got {shown(kind)}")
    return importlib.import_module(HEADS[kind].module).KIND


def part_of(kind: str, part: str) -> Any:
    """A module of a kind's room, "conversion" or "training"."""
    return importlib.import_module(f"{HEADS[kind].module}.{part}")


def refuse_head(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses another program's config.json of a head, where a model is wanted."""
    for kind, room in HEADS.items():
        if room.is_named(config.get("architectures")):
            raise ValueError(
                f"{path} is no model but a head of {room.title}; load it with load_head({kind!r},"
                f" path, target) or generate --{kind}"
            )


def check_fits(head: str, way_out: str, **sizes: tuple[Any, Any]) -> None:
    """Refuses a head whose sizes, by name, are not those that its target has."""
    if any(of_head != of_target for of_head, of_target in sizes.values()):
        of_head, of_target = (
            " and ".join(f"{name} {pair[i]}" for name, pair in sizes.items()) for i in (0, 1)
        )
        raise ValueError(f"{head} has {of_head}, and the target {of_target}; {way_out}")


def check_head(what: str, head: Any, target: HybridLM) -> None:
    """Refuses a target that a head on states of inner layers is not for."""
    check_on_one_device(target, what)
    head_config, config = head.config, target.config
    check_fits(
        "the head",
        "load it, and make the drafter, with the target that generate gets",
        width=(head_config.d_model, config.d_model),
        tokens=(head_config.vocab_size, config.vocab_size),
        dtype=(head.dtype, target.dtype),
    )
    last, layers = head_config.inner_layers[-1], len(config.layers)
    if last > layers:
        raise ValueError(f"{what} needs the state after {last} layers, and the target has {layers}")


@jax.transfer_guard("allow")
def save_head(
    head: nnx.Module | Any,
    target: HybridLM | Any,
    path: str | os.PathLike[str] | Any,
    *,
    model_card: str | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a head of any kind in its dtype, with the identity of its target's weights.

    `model_card` is Markdown to store as README.md; other arguments are those of `save_pretrained`.

    Raises:
        ValueError: `path` is not a path, or exists and `overwrite` is False; `head` is not a head,
            or the target is on a mesh.
    """
    kind = next((kind for kind in HEADS if isinstance(head, head_kind(kind).head)), None)
    if kind is None:
        raise ValueError(f"head must be one of the kinds {', '.join(HEADS)}, got {shown(head)}")
    check_on_one_device(target, f"save_{kind}")
    known = head_kind(kind)
    header = {
        "kind": kind,
        **known.written(head),
        IDENTITY: _identity(target),
        IDENTITY_BUT_MATRICES: _identity(target, matrices=False),
    }
    write_checkpoint(path, header, head, model_card, overwrite)


@jax.transfer_guard("allow")
def load_native_head(kind: str, path: str | os.PathLike[str], target: HybridLM) -> Any:
    """Loads a native checkpoint of a head, in its target's dtype."""
    known = head_kind(kind)
    path, config, header = open_head(kind, path)
    if header.get(IDENTITY) is None:
        raise ValueError(
            f"{path} was saved by an older version, which knew targets in another way; convert or"
            " train the head again"
        )
    matrices = not quantized_kinds(target)  # the others are the same in few bits
    known_by = IDENTITY if matrices else IDENTITY_BUT_MATRICES
    if header.get(known_by) != _identity(target, matrices=matrices):
        raise ValueError(f"the {known.misfit.format(path=path)}")
    return load_module(path, abstract_head(kind, config, target))


def open_head(kind: str, path: str | os.PathLike[str]) -> tuple[Path, Any, dict[str, Any]]:
    """Returns path, head's config and config.json of a native checkpoint."""
    known = head_kind(kind)
    path, header = load_header(path)
    require(header.get("kind") == kind, f"{path} {known.missing}")
    try:
        return path, known.config(header), header
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'} is damaged: {error}") from None


def abstract_head(kind: str, config: Any, target: HybridLM | None = None) -> Any:
    """Returns a head without weights, in its target's dtype, with its kernels."""
    return nnx.eval_shape(lambda: head_kind(kind).new(config, target))
