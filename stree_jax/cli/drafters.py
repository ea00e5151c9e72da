"""The drafter of a command: its options, and what they load."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import typer

import stree_jax as st
from stree_jax.cli.options import with_options


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
    },
)


class Chosen(NamedTuple):
    """The drafter that a command is asked for.

    Attributes:
        option: its option; None: there is none.
        path: where its weights are, if it has some.
    """

    option: str | None = None
    path: str | None = None

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
    if given.pop("mtp", False):
        given.setdefault("mtp_head", target)
    if len(given) > 1:
        raise ValueError(
            "--draft, --ngram, --medusa, --mtp and --eagle3 each select a drafter; choose one"
        )
    option, path = next(iter(given.items()), (None, None))
    return Chosen(option, None if path is True else path)


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
    model = _MODELS[chosen.option](chosen.path, target)
    fitted = {} if sharpness is None else {"sharpness": sharpness}
    return _GROWN.get(kind, st.ModelDrafter)(model, **fitted)


_Load = Callable[[Any, st.HybridLM], Any]


def _draft_model(path: str, target: st.HybridLM) -> st.HybridLM:
    mesh = None if target.partition is None else target.partition.mesh
    return st.from_pretrained(path, dtype=target.dtype, mesh=mesh, replicate=mesh is not None)


_MODELS: dict[str, _Load] = {
    "draft": _draft_model,
    "mtp_head": lambda path, target: st.MtpModel(target, st.load_mtp(path, target)),
    "eagle3": lambda path, target: st.Eagle3Model(target, st.load_eagle3(path, target)),
}
_OTHERS: dict[str, _Load] = {
    "ngram": lambda path, target: st.NgramDrafter(),
    "medusa": lambda path, target: st.MedusaDrafter(target, st.load_medusa(path, target)),
}
_GROWN: dict[str, Any] = {"beam": st.BeamDrafter, "budget": st.DynamicDrafter}
