"""The drafter of a command: its options, and what they load."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import stree_jax as st
from stree_jax.cli.options import with_options
from stree_jax.messages import shown

IgnoreField = Annotated[
    list[str] | None,
    typer.Option(help="Unknown field of a checkpoint's config to ignore; may be repeated."),
]


def _path(text: str) -> Any:
    return Annotated[str | None, typer.Option(help=text)], None


def _flag(name: str, text: str) -> Any:
    return Annotated[bool, typer.Option(name, help=text)], False


with_drafter_options = with_options(
    "drafts",
    {
        "draft": _path("Draft model: checkpoint directory or hub name."),
        "ngram": _flag("--ngram", "Draft by n-gram prompt lookup."),
        "medusa": _path("Medusa heads of the target: checkpoint directory."),
        "mtp": _flag("--mtp", "Draft with the target's multi-token prediction head."),
        "mtp_head": _path("The same, with a head that is not in the checkpoint."),
        "eagle3": _path("EAGLE-3 head for the target: directory or hub name."),
        "ignore_field": (IgnoreField, None),
    },
)


class Chosen(NamedTuple):
    """The drafter that a command is asked for.

    Attributes:
        option: its option; None: there is none.
        path: where its weights are, if it has some.
        ignore: unknown config fields to ignore: of all checkpoints of the command, or for
            `load_drafter` its own, see `ignored_fields`.
    """

    option: str | None = None
    path: str | None = None
    ignore: Sequence[str] = ()

    @property
    def chooses_shape(self) -> bool:
        """Whether it can choose the shape of its tree."""
        return self.option in _MODELS

    @property
    def is_head(self) -> bool:
        """Whether it drafts from its target's hidden states, which it does on one device."""
        return self.option in ("medusa", "mtp_head", "eagle3")


def chosen(target: str, drafts: Mapping[str, Any]) -> Chosen:
    """The drafter of the options, for a target.

    Raises:
        ValueError: there are several.
    """
    given = {name: value for name, value in drafts.items() if value not in (None, False)}
    ignore = given.pop("ignore_field", ())
    if given.pop("mtp", False):
        given.setdefault("mtp_head", target)
    if len(given) > 1:
        raise ValueError(
            "--draft, --ngram, --medusa, --mtp and --eagle3 each select a drafter; choose one"
        )
    option, path = next(iter(given.items()), (None, None))
    return Chosen(option, None if path is True else path, ignore)


def ignored_fields(names: Sequence[str], *checkpoints: str | Path | None) -> list[list[str]]:
    """Which of the fields of --ignore-field each of the checkpoints has.

    Raises:
        ValueError: none of them has one.
    """
    from stree_jax.convert import find, has_field  # takes time to import

    found = [
        [name for name in names if each is not None and has_field(find(each), name)]
        for each in checkpoints
    ]
    for name in names:
        if not any(name in each for each in found):
            raise ValueError(
                f"--ignore-field {shown(name)}: no checkpoint of another program here has this"
                " field; leave the option out"
            )
    return found


def load_drafter(
    chosen: Chosen, target: st.HybridLM, kind: str = "", sharpness: float | None = None
) -> st.Drafter | None:
    """Loads the drafter; None: there is none.

    Args:
        chosen: which one.
        target: the model that `generate` decodes with.
        kind: the kind of tree, such as "budget" for dynamic ones.
        sharpness: of dynamic trees.

    Raises:
        ValueError: it cannot be loaded, or is not for this target.
    """
    if chosen.option is None:
        return None
    if chosen.option in _OTHERS:
        return _OTHERS[chosen.option](chosen.path, target)
    model = _MODELS[chosen.option](chosen.path, target, chosen.ignore)
    fitted = {} if sharpness is None else {"sharpness": sharpness}
    return _GROWN.get(kind, st.ModelDrafter)(model, **fitted)


def _draft_model(path: str, target: st.HybridLM, ignore: Sequence[str]) -> st.HybridLM:
    return st.load_draft(path, target, ignore=ignore)


def _mtp_head(path: str, target: st.HybridLM, ignore: Sequence[str]) -> Any:
    return st.MtpModel(target, st.load_mtp(path, target, ignore=ignore))


def _eagle3_head(path: str, target: st.HybridLM, ignore: Sequence[str]) -> Any:
    return st.Eagle3Model(target, st.load_eagle3(path, target, ignore=ignore))


_MODELS: dict[str, Callable[[Any, st.HybridLM, Sequence[str]], Any]] = {
    "draft": _draft_model,
    "mtp_head": _mtp_head,
    "eagle3": _eagle3_head,
}
_OTHERS: dict[str, Callable[[Any, st.HybridLM], Any]] = {
    "ngram": lambda path, target: st.NgramDrafter(),
    "medusa": lambda path, target: st.MedusaDrafter(target, st.load_medusa(path, target)),
}
_GROWN: dict[str, Any] = {"beam": st.BeamDrafter, "budget": st.DynamicDrafter}
