"""The `stree-jax` command and its subcommands.

User errors are one line on stderr and exit code 2. Each command imports its own module.
"""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from stree_jax.cli.drafters import IgnoreField, chosen, with_drafter_options
from stree_jax.cli.options import read_schema, wanted, with_text_options
from stree_jax.decoding.options import Options
from stree_jax.messages import first_line, shown_path

app = typer.Typer(
    name="stree-jax",
    help=(
        "Speculative tree decoding of Mamba-2 and hybrid language models.\n\n"
        "Compiled programs are cached in ~/.cache/stree-jax, up to 256 MiB. STREE_JAX_CACHE names"
        " another folder; STREE_JAX_CACHE=off turns the cache off."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def demo(
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum number of new tokens per prompt.")
    ] = 64,
    target: Annotated[
        str | None,
        typer.Option(help="Target model instead of the embedded one: directory or hub name."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model of --target.")] = None,
    ignore_field: IgnoreField = None,
) -> None:
    """Decode with the embedded models: autoregressively, with a chain, with a tree."""
    from stree_jax.cli.demo import run_demo

    models: dict[str, Any] = {"target": target, "draft": draft, "ignore": ignore_field or ()}
    raise typer.Exit(run_demo(Console(), max_new_tokens=max_new_tokens, **models))


@app.command()
@with_text_options
@with_drafter_options
def generate(
    *,
    checkpoint: Annotated[
        str, typer.Argument(help="Target model: checkpoint directory or hub name.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to continue.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='File of prompts instead: JSON lines with a "prompt" or "messages" each.'
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="With --prompts: JSON lines file to write; by default the standard output. Rerun"
            " to resume."
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(help="With --prompts: number of texts decoded at the same time.")
    ] = 8,
    drafts: dict[str, Any],
    tree: Annotated[
        str | None,
        typer.Option(
            help="Draft tree: chain:4, complete:2,3, branching:3,2,1, paper:A or parents:-1,0,0;"
            " beam:3,4 or budget:16,5 (dynamic), whose shape the draft chooses; @FILE of tune-tree."
        ),
    ] = None,
    sharpness: Annotated[
        float | None,
        typer.Option(help="Sharpness of dynamic trees, by default 2.5; tune-tree fits it."),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            help="greedy, target_only, or with --lossy typical; by default the one that fits the"
            " temperature. Other rules are in the Python API."
        ),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow a rule that changes the output: typical.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed: the same seed, the same text.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16 weights.")] = "float32",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory or tokenizer.json; by default the checkpoint's.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Maximum length, prompt included; by default the model's."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh of devices: data=2,model=4, or auto; see docs/sharding.md."),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="With --mesh: this is one of several processes."),
    ] = False,
    settings: dict[str, Any],
) -> None:
    """Continue a prompt, printing tokens as they are accepted, or all prompts of a file."""
    from stree_jax.cli.generate import check_seed, load, run_generate

    if (prompt is None) == (prompts is None):
        raise ValueError("give either --prompt TEXT or --prompts FILE.jsonl")
    if prompts is None and output is not None:
        raise ValueError("--output is for the texts of --prompts; --prompt writes to the terminal")
    if lossy and prompts is not None:
        raise ValueError("--lossy is for a --prompt: texts of --prompts are always the target's")
    if prompt is not None:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ValueError(
                "--prompt is not UTF-8; convert it, or check the terminal's locale"
            ) from None
    check_seed(seed, "--seed")
    settings = read_schema(settings)
    asked = wanted(settings)
    Options(**asked.options, max_length=max_length)  # refuses what is wrong before loading
    source: dict[str, Any] = {
        "checkpoint": checkpoint,
        "drafter": chosen(checkpoint, drafts),
        "tree": tree,
        "sharpness": sharpness,
        "dtype": _checked(dtype) or "float32",
    }
    if mesh is None and distributed:
        raise ValueError("--distributed goes with --mesh, such as --mesh data=2,model=4")
    loaded = load(**source, tokenizer_path=tokenizer, mesh=mesh, distributed=distributed)
    if prompts is None:
        run_generate(
            Console(highlight=False, file=loaded.output),
            loaded,
            asked,
            prompt=prompt or "",
            seed=seed,
            max_length=max_length,
            verifier=verifier,
            lossy=lossy,
        )
        return
    from stree_jax.cli.batch import run_batch

    drafting = {"verifier": verifier, "seed": seed}
    fingerprint = source | settings | drafting | {"tokenizer": str(tokenizer)}
    bad = run_batch(
        Console(highlight=False, file=loaded.output, stderr=output is None),
        loaded,
        settings,
        prompts=prompts,
        output=output,
        rows=rows,
        verifier=verifier,
        seed=seed,
        max_length=max_length,
        fingerprint=fingerprint,
    )
    raise typer.Exit(1 if bad else 0)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint directory or hub name.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to create.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; by default the source's.")
    ] = None,
    to: Annotated[
        str, typer.Option(help="native, hf (the matching family), or a family's name.")
    ] = "native",
    quirk: Annotated[
        list[str] | None,
        typer.Option(help="hf_dt_floor or plain_rope; see docs/checkpoints.md."),
    ] = None,
    ignore_field: IgnoreField = None,
) -> None:
    """Convert a checkpoint of transformers, mamba_ssm, MambaInLlama or Codestral-Mamba."""
    from stree_jax.cli.convert import run_convert

    console = Console(highlight=False)
    _interrupt_by_exception()
    how = {"quirks": quirk or (), "ignore": ignore_field or ()}
    run_convert(console, source, destination, dtype=_checked(dtype), to=to, **how)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Checkpoint directory or hub name.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    ignore_field: IgnoreField = None,
) -> None:
    """Describe a checkpoint and check that it can be converted."""
    from stree_jax.cli.convert import run_inspect

    run_inspect(Console(highlight=False), path, tensors=tensors, ignore=ignore_field or ())


_Recipe = Annotated[Path, typer.Argument(help="TOML file: text, model or heads, and optimizer.")]
_Target = Annotated[Path, typer.Argument(help="Checkpoint directory of the target model.")]
_Output = Annotated[Path, typer.Argument(help="Directory to create.")]


@app.command()
def train(recipe: _Recipe, output: _Output) -> None:
    """Train a tokenizer and a model on text. Rerun to resume."""
    _train(recipe, None, output)


@app.command()
def distill(recipe: _Recipe, target: _Target, output: _Output) -> None:
    """Distill a target model into a draft model. Rerun to resume."""
    _train(recipe, target, output)


@app.command()
def medusa(recipe: _Recipe, target: _Target, output: _Output) -> None:
    """Train Medusa heads for a target. Rerun to resume."""
    _train(recipe, target, output, heads="medusa")


@app.command()
def train_mtp(recipe: _Recipe, target: _Target, output: _Output) -> None:
    """Train a multi-token prediction head for a target. Rerun to resume."""
    _train(recipe, target, output, heads="mtp")


def _train(recipe: Path, target: Path | None, output: Path, heads: str | None = None) -> None:
    from stree_jax.cli.train import run_training

    _interrupt_by_exception()
    run_training(Console(), recipe, output, target=target, heads=heads)


@app.command()
def tree(
    spec: Annotated[str, typer.Argument(help="Draft tree, as in `generate --tree`.")],
) -> None:
    """Print a draft tree."""
    from stree_jax.cli.trees import parse_tree

    topology = parse_tree(spec)
    if topology is None:
        raise ValueError(f"{spec} says not to draft: there is no tree to print")
    console = Console(highlight=False)
    console.print(topology.draw(), markup=False, soft_wrap=True)  # a wrapped tree is unreadable
    console.print(
        f"{topology.num_nodes} nodes, depth {topology.depth}, width {topology.width}", style="dim"
    )
    if spec.startswith("budget:"):
        console.print(
            "This shape only holds the place: the draft model chooses another in every step.",
            style="dim",
        )


@app.command()
@with_drafter_options
def tune_tree(
    *,
    target: Annotated[str, typer.Argument(help="Target model: checkpoint directory or hub name.")],
    drafts: dict[str, Any],
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 0.0,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='File with one prompt per line; .jsonl: objects with a "prompt" or "messages".'
        ),
    ] = None,
    max_nodes: Annotated[int, typer.Option(help="Most nodes of a tree, root included.")] = 64,
    max_depth: Annotated[int, typer.Option(help="Most drafts on a path.")] = 8,
    tokens: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 128,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16 weights.")] = "float32",
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Time more sizes and trees, more often.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="File to write, for `generate --tree @FILE`.")
    ] = None,
) -> None:
    """Find the fastest draft tree of two models on this device, or that none pays."""
    from stree_jax.cli.tune import run_tune_tree

    run_tune_tree(
        Console(highlight=False),
        target=target,
        drafter=chosen(target, drafts),
        temperature=temperature,
        prompts=prompts,
        max_nodes=max_nodes,
        max_depth=max_depth,
        max_new_tokens=tokens,
        seed=seed,
        dtype=_checked(dtype) or "float32",
        thorough=thorough,
        output=output,
    )


def _interrupt_by_exception() -> None:
    """For commands that write no files in part: Ctrl-C raises, as everywhere in Python."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted() -> NoReturn:
    """Exits without the interpreter's teardown, which crashes amid a compilation."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def _checked(dtype: str | None) -> str | None:
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"--dtype must be float32 or bfloat16, got {dtype!r}")
    return dtype


def main() -> None:
    """Runs the command and prints warnings and user errors as one line."""
    warnings.formatwarning = lambda message, *_, **__: f"stree-jax: warning: {message}\n"
    try:
        sys.exit(app(standalone_mode=False))
    except (typer.Abort, KeyboardInterrupt):
        _interrupted()
    except (ValueError, FloatingPointError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:  # which may be very long
            message = f"{shown_path(str(error.filename))}: {error.strerror}"
        print(f"stree-jax: error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except BaseException as error:
        # Usage errors are ClickExceptions, recognized by their method because new versions of typer
        # vendor click under a private name.
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            message = "out of memory"
        elif type(error).__name__ == "PanicException":  # of the tokenizers package
            message = first_line(error)
        elif hasattr(error, "format_message"):
            message = " ".join(error.format_message().split())  # empty after --help
        else:
            raise
        if message:
            print(f"stree-jax: error: {message}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
