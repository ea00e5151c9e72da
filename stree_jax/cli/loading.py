"""What a command decodes with: the models, the drafter and the texts that its options name."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import stree_jax as st
from stree_jax.cli.options import Drafts, Generate, sampling
from stree_jax.cli.trees import parse_tree
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.convert import find, has_field
from stree_jax.messages import first_line, shown
from stree_jax.text import Texts

_MODELS = ("draft", "mtp_head", "eagle3")  # options of drafters that can choose a tree's shape
_HEADS = ("medusa", "mtp_head", "eagle3")  # and of those that draft on one device


class Chosen(NamedTuple):
    """The drafter that a command is asked for.

    Attributes:
        option: its option; None: there is none.
        path: where its weights are, if it has some.
        ignore: unknown config fields to ignore, of all checkpoints of the command.
        quantize: "int8": in 8 bits.
    """

    option: str | None = None
    path: str | None = None
    ignore: Sequence[str] = ()
    quantize: str | None = None


def chosen(target: str, drafts: Drafts) -> Chosen:
    """The drafter of the options, for a target."""
    options = ("draft", "ngram", "medusa", "mtp_head", "eagle3")
    given = {option: getattr(drafts, option) for option in options}
    if drafts.mtp and drafts.mtp_head is None:
        given["mtp_head"] = target
    given = {option: path for option, path in given.items() if path not in (None, False)}
    if len(given) > 1:
        raise ValueError(
            "--draft, --ngram, --medusa, --mtp and --eagle3 each select a drafter; choose one"
        )
    option, path = next(iter(given.items()), (None, None))
    quantize = drafts.draft_quantize
    if quantize is not None and option in (None, "ngram"):
        raise ValueError("--draft-quantize is for a draft model or heads: give --draft or --mtp")
    return Chosen(option, None if path is True else path, drafts.ignore_field, quantize)


def load_models(
    target: str | Path,
    drafter: Chosen,
    *,
    adapter: str | None = None,
    dtype: str = "float32",
    quantize: str | None = None,
    mesh: Mesh | None = None,
    kind: str = "",
    sharpness: float | None = None,
) -> tuple[st.HybridLM, st.Drafter | None]:
    """Loads a target and its drafter; from then on, compiled programs are kept.

    `kind` is that of the tree, such as "budget" for dynamic ones, which have a `sharpness`.
    """
    changes = None if adapter is None else find(adapter, adapter=True)
    ignore, of_drafter, own = _ignored_fields(drafter.ignore, target, drafter.path, changes)
    enable_compilation_cache()
    model = st.from_pretrained(
        target,
        dtype=dtype,
        quantize=quantize,
        ignore=[*ignore, *own],
        adapter=changes,
        mesh=mesh,
    )
    path: Any = drafter.path
    small = {"quantize": drafter.quantize}
    match drafter.option:
        case None:
            return model, None
        case "ngram":
            return model, st.NgramDrafter()
        case "medusa":
            return model, st.MedusaDrafter(model, st.load_medusa(path, model, **small))
        case "mtp_head":
            head = st.load_mtp(path, model, ignore=of_drafter, **small)
            draft: Any = st.MtpModel(model, head)
        case "eagle3":
            draft = st.Eagle3Model(model, st.load_eagle3(path, model, ignore=of_drafter, **small))
        case _:
            draft = st.load_draft(path, model, ignore=of_drafter, **small)
    grown: Any = {"beam": st.BeamDrafter, "budget": st.DynamicDrafter}.get(kind, st.ModelDrafter)
    return model, grown(draft) if sharpness is None else grown(draft, sharpness=sharpness)


def _ignored_fields(names: Sequence[str], *checkpoints: str | Path | None) -> list[list[str]]:
    """Which of the fields of --ignore-field each of the checkpoints has."""
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


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What `generate` decodes with. The grammars of texts are made once.

    Attributes:
        model: the target.
        drafting: the drafter, its tree and the verifier, as keywords of `generate`.
        texts: the target's.
    """

    model: st.HybridLM
    drafting: dict[str, Any]
    texts: Texts
    _grammars: dict[str, st.Automaton | ValueError] = dataclasses.field(default_factory=dict)

    def options(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The keywords of `Options` for the settings of a text, its grammar among them."""
        ends = self.texts.end_tokens(self.model.config, asked["eos_token"])
        kinds = [kind for kind in ("regex", "json_schema") if asked[kind] is not None]
        grammars = [self._grammar(kind, asked[kind], ends) for kind in kinds]
        return sampling(asked) | {"eos_token": ends or None, "processors": grammars}

    def _grammar(self, name: str, argument: Any, ends: list[int]) -> st.Automaton:
        key = json.dumps([name, argument, ends])
        if key not in self._grammars:
            make = {"regex": st.regex, "json_schema": st.json_schema}[name]
            try:
                made = make(argument, self.texts.tokenizer(""), eos_token=ends or None)
                self._grammars[key] = made
            except ValueError as error:
                self._grammars[key] = error
        found = self._grammars[key]
        if isinstance(found, ValueError):
            raise found
        return found


def load(command: Generate) -> Loaded:
    """Loads models and tokenizer for `generate`."""
    tree, mesh, sharpness = command.tree, command.mesh, command.sharpness
    drafter = chosen(command.checkpoint, command)
    topology = None if tree is None else parse_tree(tree)
    if tree is not None and topology is None:  # the tuned result: do not draft
        drafter = Chosen(ignore=drafter.ignore)
    kind = "" if tree is None else tree.partition(":")[0]
    if mesh is None and command.distributed:
        raise ValueError("--distributed goes with --mesh, such as --mesh data=2,model=4")
    if sharpness is not None and (kind != "budget" or drafter.option not in _MODELS):
        raise ValueError(
            "--sharpness is for dynamic trees: give --tree budget:16,5 and --draft, --mtp or"
            " --eagle3 with it"
        )
    if kind in ("beam", "budget") and drafter.option in ("ngram", "medusa"):
        raise ValueError(
            f"--tree {tree}: only a draft model chooses the shape of its tree; use --draft, --mtp"
            " or --eagle3, or another tree such as branching:3,2,1"
        )
    if mesh is not None and drafter.option in _HEADS:
        raise ValueError(
            f"--mesh {mesh:.80}: heads draft on one device; leave --mesh out, or draft with --draft"
            " or --ngram"
        )
    texts = Texts.at(command.tokenizer or find(command.checkpoint))
    if command.distributed:
        join_processes()
    model, of_model = load_models(
        command.checkpoint,
        drafter,
        adapter=command.adapter,
        dtype=command.dtype,
        quantize=command.quantize,
        mesh=None if mesh is None else parse_mesh(mesh),
        kind=kind,
        sharpness=sharpness,
    )
    drafting = {"drafter": of_model, "topology": topology, "verifier": command.verifier}
    return Loaded(model, drafting, texts)


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
    """Joins the other processes of this command; must be the first use of jax.

    jax finds them on Slurm, Open MPI and TPUs. Elsewhere each process sets the address of process
    0, the number of processes and its own index: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID.
    """
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
