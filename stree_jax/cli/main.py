"""The `stree-jax` command: demo, generate, convert, inspect, train, distill, tree.

Every error that a user can cause is one line on stderr and exit code 2. Modules that import jax are
imported by the commands that need them, so that `--help` is quick.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add to each prompt.")] = 64,
    target: Annotated[
        str | None, typer.Option(help="Another target: a directory, or a name on the hub.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft; needed with --target.")] = None,
) -> None:
    """Decode with the embedded pair: autoregressively, with a chain and with a tree."""
    from stree_jax.cli.demo import run_demo

    raise typer.Exit(run_demo(Console(), max_new_tokens=max_new_tokens, target=target, draft=draft))


@app.command()
def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="Directory of the target model, or its name on the hub.")
    ],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Text to continue.", show_default=False)
    ],
    draft: Annotated[str | None, typer.Option(help="Directory of a draft model.")] = None,
    ngram: Annotated[bool, typer.Option("--ngram", help="Draft by prompt lookup.")] = False,
    tree: Annotated[
        str | None,
        typer.Option(
            help="chain:4, complete:2,3, branching:3,2,1, beam:3,4, paper:A or parents:-1,0,0."
        ),
    ] = None,
    verifier: Annotated[str | None, typer.Option(help="How drafts are accepted.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the best token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k best tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most probable p.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random key.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory or tokenizer.json, if not the checkpoint's.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Most tokens, prompt included, if not what the model was made for."),
    ] = None,
) -> None:
    """Continue a text; tokens are shown as they are accepted."""
    from stree_jax.cli.generate import run_generate

    run_generate(
        Console(highlight=False),
        checkpoint=checkpoint,
        prompt=prompt,
        draft=draft,
        ngram=ngram,
        tree=tree,
        verifier=verifier,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        dtype=_checked(dtype) or "float32",
        tokenizer_path=tokenizer,
        max_length=max_length,
    )


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Checkpoint directory, or a name on the hub.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to create.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; else as the source.")
    ] = None,
    to: Annotated[
        str, typer.Option(help="native, hf (the family that fits), or a family's name.")
    ] = "native",
    quirk: Annotated[
        list[str] | None,
        typer.Option(help="hf_dt_floor or plain_rope: reproduce others, see docs/checkpoints.md."),
    ] = None,
) -> None:
    """Convert a checkpoint of transformers, mamba_ssm, MambaInLlama or Codestral-Mamba."""
    from stree_jax.cli.convert import run_convert

    console = Console(highlight=False)
    run_convert(
        console, source, destination, dtype=_checked(dtype), to=to, quirks=tuple(quirk or ())
    )


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Checkpoint directory, or a name on the hub.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
) -> None:
    """Say what a checkpoint is and whether it can be converted."""
    from stree_jax.cli.convert import run_inspect

    run_inspect(Console(highlight=False), path, tensors=tensors)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="TOML file: text, model and optimisation.")],
    output: Annotated[Path, typer.Argument(help="Directory of the checkpoint to write.")],
) -> None:
    """Train a tokenizer and a model on text. Started again, it goes on where it stopped."""
    from stree_jax.cli.train import run_training

    run_training(Console(), recipe, output, target=None)


@app.command()
def distill(
    recipe: Annotated[Path, typer.Argument(help="TOML file: text, model and optimisation.")],
    target: Annotated[Path, typer.Argument(help="Directory of the model to imitate.")],
    output: Annotated[Path, typer.Argument(help="Directory of the checkpoint to write.")],
) -> None:
    """Train a draft model to predict what a target model predicts."""
    from stree_jax.cli.train import run_training

    run_training(Console(), recipe, output, target=target)


@app.command()
def tree(
    spec: Annotated[str, typer.Argument(help="As in `generate --tree`.")],
) -> None:
    """Draw a draft tree."""
    from stree_jax.cli.trees import parse_tree

    topology = parse_tree(spec)
    console = Console(highlight=False)
    console.print(topology.draw(), markup=False)
    console.print(
        f"{topology.num_nodes} nodes, depth {topology.depth}, width {topology.width}", style="dim"
    )


def _checked(dtype: str | None) -> str | None:
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"--dtype must be float32 or bfloat16, got {dtype!r}")
    return dtype


def main() -> None:
    """Runs the command and turns errors into one line."""
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort:
        sys.exit(130)
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"stree-jax: error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # What the user typed: a ClickException. typer has its own copy of click, under a private
        # name in new versions.
        if not hasattr(error, "format_message"):
            raise
        if message := " ".join(error.format_message().split()):  # none after help was shown
            print(f"stree-jax: error: {message}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
