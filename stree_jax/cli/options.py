"""The commands' options, each described once: as a field of what a command is asked for.

typer makes a command of each class here that has a docstring for its user: an option has the name,
the type and the default of a field. What the user chose is an object of the class. The fields of a
base come before those of a class, and those of its last base come first.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from typer import Argument, Option

from stree_jax.decoding.options import Options
from stree_jax.decoding.prompts import check_num_rows
from stree_jax.heads import HEADS
from stree_jax.messages import shown

flag = functools.partial(Option, False, metavar=" ")  # without the type that help would show
_DTYPE = Option("float32", help="float32 or bfloat16 weights.")
_QUANTIZE = Option(None, help="int8 or int4: the target's matrices in 8 or 4 bits.")
_ADAPTER = Option(
    None, help="LoRA adapter (PEFT) to merge into the checkpoint: directory or hub name."
)
_MESH = Option(None, help="Mesh of devices: data=2,model=4, one of the two, or auto: rows on all.")
_PROMPTS = Option(
    None,
    help='File with one prompt per line; .jsonl: objects with a "prompt", "messages" or "turns".',
)
_CHAT_TEMPLATE = Option(
    None, help="With --prompts: file with the chat template of messages; by default the model's."
)
_TOKENS = "--max-new-tokens", "--tokens"  # the second is an older name
_IGNORE_FIELD = Option(
    [], help="Unknown field of a checkpoint's config to ignore; may be repeated."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Decode with the embedded models: without drafts, with a chain, with a tree."""

    max_new_tokens: int = Option(64, help="Maximum number of new tokens per prompt.")
    target: str | None = Option(
        None, help="Target model instead of the embedded one: directory or hub name."
    )
    draft: str | None = Option(None, help="Draft model of --target.")
    ignore_field: list[str] = _IGNORE_FIELD


def _of_drafts() -> Any:
    """The options of a draft model, and of each kind of head in the table."""
    fields: list[Any] = [
        ("draft", str | None, Option(None, help="Draft model: checkpoint directory or hub name."))
    ]
    for kind, room in HEADS.items():
        if room.own:
            fields.append((kind, bool, flag(f"--{kind}", help=room.own)))
        if room.option:
            name = f"{kind}_head" if room.own else kind
            fields.append((name, str | None, Option(None, help=room.option)))
    return dataclasses.make_dataclass("_OfDrafts", fields, frozen=True, kw_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModels(_of_drafts()):  # type: ignore[misc]
    """Draft models and heads."""

    draft_quantize: str | None = Option(
        None,
        help="int8 or int4 for the draft or the heads, which changes no text.",
    )
    ignore_field: list[str] = _IGNORE_FIELD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts(DraftModels):
    """The drafter."""

    ngram: bool = flag("--ngram", help="Draft by n-gram prompt lookup.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(DraftModels):
    """Measure what drafts bring a target on this machine; by default, the embedded pair."""

    target: str | None = Argument(None, help="Target model: checkpoint directory or hub name.")
    adapter: str | None = _ADAPTER
    tree: list[str] = Option(
        [], help="Draft tree, as in `generate --tree`; may be repeated. By default one of 5 nodes."
    )
    verifier: str | None = Option(
        None, help="greedy or target_only; by default the one that fits the temperature."
    )
    temperature: list[float] = Option([0.0], help="0 is greedy decoding; may be repeated.")
    prompts: Path | None = _PROMPTS
    chat_template: Path | None = _CHAT_TEMPLATE
    max_new_tokens: int = Option(96, *_TOKENS, help="New tokens of each text, at most.")
    rows: int = Option(1, help="Number of texts decoded at the same time.")
    rounds: int = Option(3, help="Timed runs of each text.")
    dtype: str = _DTYPE
    quantize: str | None = _QUANTIZE
    mesh: str | None = _MESH
    json: Path | None = Option(None, help="File to write what was measured to, round by round.")
    plot: Path | None = Option(None, help="Picture to draw: a .png or .svg file.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """What is continued, and where it is written."""

    checkpoint: str = Argument(help="Target model: checkpoint directory, GGUF file or hub name.")
    adapter: str | None = _ADAPTER
    prompt: str | None = Option(
        None, "--prompt", "-p", help="Text to continue.", show_default=False
    )
    prompts: Path | None = Option(
        None, help='File of prompts instead: JSON lines with a "prompt" or "messages" each.'
    )
    output: Path | None = Option(
        None,
        help="With --prompts: JSON lines file to write; by default the standard output. Rerun to"
        " resume.",
    )
    rows: int | None = Option(
        None, help="With --prompts: number of texts decoded at the same time; by default 8."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """How it is decoded."""

    tree: str | None = Option(
        None,
        help="Draft tree: chain:4, complete:2,3, branching:3,2,1, paper:A or parents:-1,0,0;"
        " beam:3,4 or budget:16,5 (dynamic), whose shape the draft chooses; auto: none or one of a"
        " few, in turns; @FILE of tune-tree, auto@FILE for its few. By default"
        " parents:-1,0,0,1,3; with --ngram chain:4.",
    )
    sharpness: float | None = Option(
        None, help="Sharpness of dynamic trees, by default 2.5; tune-tree fits it."
    )
    verifier: str | None = Option(
        None,
        help="greedy, target_only, or with --lossy typical; by default the one that fits the"
        " temperature. Other rules are in the Python API.",
    )
    lossy: bool = flag("--lossy", help="Allow a rule that changes the output: typical.")
    show: bool = flag("--show", help="Mark accepted drafts: green, or in brackets in a file.")
    seed: int = Option(0, help="Random seed: the same seed, the same text.")
    dtype: str = _DTYPE
    quantize: str | None = _QUANTIZE
    tokenizer: Path | None = Option(
        None, help="Directory or tokenizer.json; by default the checkpoint's."
    )
    chat_template: Path | None = _CHAT_TEMPLATE
    max_length: int | None = Option(
        None, help="Maximum length, prompt included; by default the model's."
    )
    mesh: str | None = _MESH
    distributed: bool = flag("--distributed", help="With --mesh: this is one of several processes.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The texts of a prompt; a line of a file of prompts may have its own of the same names."""

    max_new_tokens: int = Option(128, help="Maximum number of new tokens.")
    min_new_tokens: int = Option(
        Options.min_new_tokens, help="No end token before as many new tokens."
    )
    temperature: float = Option(Options.temperature, help="0 is greedy decoding.")
    top_k: int = Option(Options.top_k, help="Sample from the k most probable tokens; 0: all.")
    top_p: float = Option(Options.top_p, help="Nucleus sampling: keep probability mass p.")
    min_p: float = Option(
        Options.min_p, help="Keep tokens that are at least p times as probable as the best."
    )
    eos_token: list[str] | None = Option(
        None,
        help="End after this token, an id or its text; may be repeated. By default the"
        " checkpoint's end tokens.",
    )
    bos: bool = Option(
        True,
        "--bos/--no-bos",
        metavar=" ",
        help="Begin with the token that the tokenizer puts before a text, if it has one.",
    )
    stop: list[str] | None = Option(None, help="Stop before this text; may be repeated.")
    log_probs: bool = flag("--log-probs", help="Log-probability of each new token, as JSON.")
    n: int = Option(1, "--n", help="Number of texts of each prompt.")
    regex: str | None = Option(
        None, help="The new text matches this regular expression as a whole."
    )
    json_schema: Path | None = Option(
        None, help="The new text is JSON that the schema in this file validates."
    )

    def settings(self) -> dict[str, Any]:
        """The values by name, with the schema itself in the place of the path of its file."""
        names = [field.name for field in dataclasses.fields(TextOptions)]
        values = {name: getattr(self, name) for name in names}
        if self.eos_token is not None:  # on the command line a number is an id
            ends = [int(end) if end.isdecimal() else end for end in self.eos_token]
            values["eos_token"] = ends or None
        if self.json_schema is not None:
            try:
                values["json_schema"] = self.json_schema.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"--json-schema {self.json_schema} cannot be read: {error}"
                ) from None
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(TextOptions, Decoding, Drafts, Prompts):
    """Continue a prompt, printing tokens as they are accepted, or all prompts of a file."""

    @classmethod
    def of(cls, checkpoint: str, **options: Any) -> "Generate":
        """What a program asks for: other options have the defaults of the command line."""
        fields: Any = dataclasses.fields(cls)
        defaults = {field.name: field.default.default for field in fields}
        return cls(**defaults | options | {"checkpoint": checkpoint})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a checkpoint of transformers, mamba_ssm, MambaInLlama or Codestral-Mamba."""

    source: str = Argument(metavar="SRC", help="Checkpoint directory or hub name.")
    destination: Path = Argument(metavar="DST", help="Directory to create.")
    dtype: str | None = Option(None, help="float32 or bfloat16; by default the source's.")
    to: str = Option("native", help="native, hf (the matching family), or a family's name.")
    quantize: str | None = Option(None, help="int8 or int4: matrices in 8 or 4 bits.")
    keep: list[str] = Option(
        [], help='With --quantize: a matrix that stays, such as "embedding"; may be repeated.'
    )
    quirk: list[str] = Option(
        [],
        help="Not as the config says, but as programs do: hf_dt_floor (Nemotron-H, Zamba2) or"
        " plain_rope (MambaInLlama).",
    )
    adapter: str | None = _ADAPTER
    ignore_field: list[str] = _IGNORE_FIELD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe a checkpoint and check that it can be converted."""

    path: str = Argument(help="Checkpoint directory or hub name.")
    tensors: bool = flag("--tensors", help="List all tensors.")
    adapter: str | None = _ADAPTER
    ignore_field: list[str] = _IGNORE_FIELD


_RECIPE = Argument(help="TOML file: text, model or heads, and optimizer.")
_OUTPUT = Argument(help="Directory to create.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train a tokenizer and a model on text. Rerun to resume."""

    recipe: Path = _RECIPE
    output: Path = _OUTPUT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill:
    """Distill a target model into a draft model. Rerun to resume."""

    kind: ClassVar[str] = ""  # of heads
    recipe: Path = _RECIPE
    target: Path = Argument(help="Checkpoint directory of the target model.")
    output: Path = _OUTPUT


def _trains(kind: str, what: str) -> type[Distill]:
    attributes = {"__doc__": f"Train {what} for a target. Rerun to resume.", "kind": kind}
    return type(f"Train{kind}", (Distill,), attributes)


# The command that trains heads of each kind, by its options.
TRAINING_COMMANDS = {
    _trains(kind, room.training[1]): room.training[0]
    for kind, room in HEADS.items()
    if room.training
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """Print a draft tree."""

    spec: str = Argument(help="Draft tree, as in `generate --tree`.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneTree(Drafts):
    """Find the fastest draft tree here, or that none pays; by default, of the embedded pair."""

    target: str | None = Argument(None, help="Target model: checkpoint directory or hub name.")
    adapter: str | None = _ADAPTER
    temperature: float = Option(0.0, help="0 is greedy decoding.")
    prompts: Path | None = _PROMPTS
    chat_template: Path | None = _CHAT_TEMPLATE
    max_nodes: int = Option(64, help="Most nodes of a tree, root included.")
    max_depth: int = Option(8, help="Most drafts on a path.")
    max_new_tokens: int = Option(128, *_TOKENS, help="New tokens of each prompt.")
    seed: int = Option(0, help="Random seed.")
    dtype: str = _DTYPE
    quantize: str | None = _QUANTIZE
    thorough: bool = flag("--thorough", help="Time more sizes and trees, more often.")
    output: Path | None = Option(None, help="File to write, for `generate --tree @FILE`.")


def wanted(settings: Mapping[str, Any], line: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of a prompt's texts; the values of a line of a file replace the command's."""
    of_line = {name: value for name, value in (line or {}).items() if name in settings}
    if {"regex", "json_schema"} & of_line.keys():  # its grammar replaces that of the command
        of_line = {"regex": None, "json_schema": None} | of_line
    merged = {**settings, **of_line}
    if merged["regex"] is not None and merged["json_schema"] is not None:
        raise ValueError("a text has one grammar: give a regular expression or a JSON schema")
    check_num_rows("n", merged["n"])
    if not isinstance(merged["bos"], bool):
        raise ValueError(f"bos must be true or false, got {shown(merged['bos'])}")
    return merged | {"stop": merged["stop"] or ()}
