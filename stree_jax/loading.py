"""What to decode with, by words: models, the drafter, trees, a mesh, grammars.

A word is an option of `stree-jax generate`, and an argument of a model of lm-evaluation-harness.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import stree_jax as st
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.convert import find, has_field
from stree_jax.decoding import DraftModel
from stree_jax.decoding.options import Options, check_keywords
from stree_jax.heads import HEADS, head_kind
from stree_jax.messages import first_line, shown
from stree_jax.text import Texts
from stree_jax.tree import TreeTopology, parsed

# What `load` takes.
WORDS = {
    *("adapter", "chat_template", "distributed", "draft", "draft_quantize", "dtype"),
    *("ignore_field", "lossy", "mesh", "ngram", "quantize", "sharpness", "tokenizer", "tree"),
    "verifier",
    *(kind for kind, room in HEADS.items() if room.option),
    *(f"{kind}_head" for kind, room in HEADS.items() if room.own),
}


class Chosen(NamedTuple):
    """A drafter, before it is loaded."""

    option: str | None = None  # "draft", "ngram" or a kind of head
    path: str | None = None
    quantize: str | None = None


def chosen(target: str | None, words: Mapping[str, Any]) -> Chosen:
    """The drafter of the words, for a target; None: the embedded one."""
    drafters = all_chosen(target, words)
    if words.get("ngram"):
        drafters.append(Chosen("ngram"))
    if len(drafters) > 1:
        options = " and ".join(f"--{drafter.option}" for drafter in drafters)
        raise ValueError(f"{options} each select a drafter; choose one")
    return drafters[0] if drafters else Chosen()


def all_chosen(target: str | None, words: Mapping[str, Any]) -> list[Chosen]:
    """The draft models and heads of the words; the embedded target has the embedded draft."""
    paths = {"draft": words.get("draft")}
    if paths["draft"] == "ngram" and not Path("ngram").exists():
        raise ValueError("--draft is for a draft model: prompt lookup is --ngram, without a value")
    for kind in filter(lambda kind: HEADS[kind].option, HEADS):
        paths[kind] = words.get(kind)
        if HEADS[kind].own:  # a flag: the head is in the target's checkpoint
            separate = words.get(f"{kind}_head")
            has_head = paths[kind] and separate is None
            paths[kind] = (target or str(st.demo_path("target"))) if has_head else separate
    if target is None and not words.get("ngram") and not any(paths.values()):
        paths["draft"] = str(st.demo_path("draft"))
    quantize = words.get("draft_quantize")
    drafters = [
        Chosen(option, path, quantize) for option, path in paths.items() if path is not None
    ]
    if not drafters and quantize is not None:
        raise ValueError(
            "--draft-quantize is for a draft model or heads: give one, as --draft does"
        )
    return drafters


def is_model(option: str | None) -> bool:
    """True if an option's drafter can choose the shape of its trees."""
    if option in HEADS:
        return issubclass(head_kind(option).drafts, DraftModel)
    return option == "draft"


def models() -> str:
    """The options of such drafters."""
    return ", ".join(f"--{option}" for option in ("draft", *HEADS) if is_model(option))


def check_drafter(option: str | None, trees: Sequence[str], mesh: str | None) -> None:
    """Refuses a tree whose shape the drafter would have to choose and cannot; heads on a mesh."""
    for spec in trees:
        if kind_of(spec) in ("beam", "budget") and option is not None and not is_model(option):
            raise ValueError(
                f"--tree {spec}: only a draft model chooses the shape of its tree; use one of"
                f" {models()}, or another tree such as branching:3,2,1"
            )
    if mesh is not None and option in HEADS:
        raise ValueError(
            f"--mesh {mesh:.80}: heads draft on one device; leave --mesh out, or draft with --draft"
            " or --ngram"
        )


def load_models(
    target: str | Path,
    drafter: Chosen,
    ignore: Sequence[str] = (),
    *,
    kind: str = "",
    sharpness: float | None = None,
    **options: Any,
) -> tuple[st.HybridLM, st.Drafter | None]:
    """Loads a target, and its drafter for a kind of tree."""
    model, (draft,) = load_all(target, [drafter], ignore, **options)
    return model, drafter_of(drafter, draft, kind, sharpness)


def load_all(
    target: str | Path,
    drafters: Sequence[Chosen],
    ignore: Sequence[str],
    *,
    adapter: str | None = None,
    dtype: str = "float32",
    quantize: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[st.HybridLM, list[Any]]:
    """Loads a target, and what `drafter_of` makes each drafter of.

    `ignore` are unknown config fields, each of one of the checkpoints or of several.
    """
    changes = None if adapter is None else find(adapter, adapter=True)
    paths = (drafter.path for drafter in drafters)
    of_target, of_adapter, *of_drafters = _ignored_fields(ignore, target, changes, *paths)
    enable_compilation_cache()
    model = st.from_pretrained(
        target,
        dtype=dtype,
        quantize=quantize,
        ignore=[*of_target, *of_adapter],
        adapter=changes,
        mesh=mesh,
    )
    pairs = zip(drafters, of_drafters, strict=True)
    return model, [_load_drafts(model, drafter, fields) for drafter, fields in pairs]


def _load_drafts(model: st.HybridLM, drafter: Chosen, ignore: Sequence[str]) -> Any:
    """A draft model, or a drafter that has none."""
    path: Any = drafter.path
    if drafter.option is None:
        return None
    if drafter.option == "ngram":
        return st.NgramDrafter()
    if drafter.option == "draft":
        return st.load_draft(path, model, ignore=ignore, quantize=drafter.quantize)
    head = st.load_head(drafter.option, path, model, ignore=ignore, quantize=drafter.quantize)
    return head_kind(drafter.option).drafts(model, head)


def drafter_of(
    drafter: Chosen, drafts: Any, kind: str = "", sharpness: float | None = None
) -> st.Drafter | None:
    """The drafter of what was loaded for it, for a kind of tree."""
    if not is_model(drafter.option):
        return drafts
    classes = {"beam": st.BeamDrafter, "budget": st.DynamicDrafter}
    drafter_class: Any = classes.get(kind, st.ModelDrafter)
    return drafter_class(drafts, **({} if sharpness is None else {"sharpness": sharpness}))


def _ignored_fields(names: Sequence[str], *checkpoints: str | Path | None) -> list[list[str]]:
    """Which of the fields of --ignore-field each of the checkpoints has."""
    fields = [
        [name for name in names if path is not None and has_field(find(path), name)]
        for path in checkpoints
    ]
    for name in names:
        if not any(name in ignored for ignored in fields):
            raise ValueError(
                f"--ignore-field {shown(name)}: no checkpoint of another program here has this"
                " field; leave the option out"
            )
    return fields


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What texts are decoded with; grammars are made once."""

    model: st.HybridLM
    way: st.Way
    texts: Texts
    _grammars: dict[str, st.Automaton] = dataclasses.field(default_factory=dict)

    def options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of `Options` for the settings of a text, its grammar among them."""
        ends = self.texts.end_tokens(self.model.config, settings.get("eos_token"))
        grammars = [
            self._grammar(kind, settings[kind], ends)
            for kind in ("regex", "json_schema")
            if settings.get(kind) is not None
        ]
        return sampling(settings) | {"eos_token": ends or None, "processors": grammars}

    def _grammar(self, name: str, argument: Any, ends: list[int]) -> st.Automaton:
        key = json.dumps([name, argument, ends])
        if key not in self._grammars:
            make = {"regex": st.regex, "json_schema": st.json_schema}[name]
            self._grammars[key] = make(argument, self.texts.tokenizer(""), eos_token=ends or None)
        return self._grammars[key]


def sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are keywords of `Options`, but for the end tokens, which may be texts."""
    names = {field.name for field in dataclasses.fields(Options)} - {"eos_token"}
    return {name: value for name, value in settings.items() if name in names}


def load(
    checkpoint: str,
    *,
    tree: str | None = None,
    sharpness: float | None = None,
    adapter: str | None = None,
    dtype: str = "float32",
    quantize: str | None = None,
    tokenizer: str | Path | None = None,
    chat_template: Path | None = None,
    mesh: str | None = None,
    distributed: bool = False,
    verifier: str | None = None,
    lossy: bool = False,
    **drafts: Any,
) -> Loaded:
    """Loads models and tokenizer. `drafts` are words that choose a drafter, as draft="FOLDER"."""
    check_keywords("load", drafts, WORDS)
    drafter = chosen(checkpoint, drafts)
    topology = None if tree is None else parse_tree(tree)
    if tree is not None and topology is None:  # the tuned result: do not draft
        drafter = Chosen()
    kind = "" if tree is None else kind_of(tree)
    if mesh is None and distributed:
        raise ValueError("--distributed goes with --mesh, such as --mesh data=2,model=4")
    if sharpness is not None and not (kind == "budget" and is_model(drafter.option)):
        raise ValueError(
            f"--sharpness is for dynamic trees: give --tree budget:16,5 and one of {models()}"
        )
    check_drafter(drafter.option, [] if tree is None else [tree], mesh)
    texts = Texts.at(tokenizer or find(checkpoint), chat_template)
    if distributed:
        join_processes()
    model, loaded = load_models(
        checkpoint,
        drafter,
        drafts.get("ignore_field", ()),
        adapter=adapter,
        dtype=dtype,
        quantize=quantize,
        mesh=None if mesh is None else parse_mesh(mesh),
        kind=kind,
        sharpness=sharpness,
    )
    return Loaded(model, st.Way(loaded, topology, verifier, lossy), texts)


def kind_of(spec: str) -> str:
    """The word that begins the specification of a tree, such as "budget"."""
    return spec.partition(":")[0]


def parse_tree(spec: str) -> Any:
    """As `stree_jax.tree.parsed`; None, not to draft, if the tree has its root alone."""
    topology = parsed(spec)
    return None if isinstance(topology, TreeTopology) and topology.num_nodes == 1 else topology


def parse_mesh(spec: str) -> Mesh:
    """The mesh of "data=2,model=4", "model=4" or "auto", which puts all devices on "data"."""
    if spec == "auto":
        return st.make_mesh(data=jax.device_count())
    sizes: dict[str, int] = {}
    for part in spec.split(","):
        match = re.fullmatch(r"(data|model)=([1-9][0-9]{0,5})", part.strip(), re.ASCII)
        if match is None or match[1] in sizes:
            raise ValueError(
                f"--mesh {spec:.80} is not a mesh: use data=2,model=4, one of the two, or auto"
            )
        sizes[match[1]] = int(match[2])
    return st.make_mesh(**sizes)


def join_processes() -> None:
    """Joins the other processes of this command; must be the first use of jax."""
    numbers: list[int | None] = []
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        value = os.environ.get(name)
        if value is not None and not re.fullmatch("[0-9]{1,6}", value, re.ASCII):
            raise ValueError(f"{name} must be a number, got {value:.80}")
        numbers.append(None if value is None else int(value))
    try:
        jax.distributed.initialize(num_processes=numbers[0], process_id=numbers[1])
    except Exception as error:  # jax raises many types
        raise ValueError(
            f"--distributed found no other processes ({first_line(error)}); start one on each host"
            " with Slurm or Open MPI, or set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES"
            " and JAX_PROCESS_ID"
        ) from None
