"""The `stree-jax` command and its subcommands.

User errors, which all functions here raise as ValueError, are one line on stderr and exit code 2.
Each command imports its own module.
"""

import contextlib
import errno
import io
import os
import pkgutil
import signal
import sys
import warnings
from typing import Any, NoReturn

import typer

from pallas_kernels import native
from stree_jax import __version__
from stree_jax.cli import options
from stree_jax.messages import first_line, shown_path

# Each command by its options: its name, and the function that gets them.
_COMMANDS: dict[type, tuple[str, str]] = {
    options.Demo: ("demo", "demo:run_demo"),
    options.Bench: ("bench", "bench:run_bench"),
    options.Generate: ("generate", "generate:run_generate"),
    options.Convert: ("convert", "convert:run_convert"),
    options.Inspect: ("inspect", "convert:run_inspect"),
    options.Train: ("train", "train:run_training"),
    options.Distill: ("distill", "train:run_training"),
    **{
        trained: (name, "train:run_training") for trained, name in options.TRAINING_COMMANDS.items()
    },
    options.Tree: ("tree", "trees:run_tree"),
    options.TuneTree: ("tune-tree", "tune:run_tune_tree"),
}
_WITHOUT_PARTIAL_FILES = options.Convert | options.Train | options.Distill


def _run(command: Any) -> None:
    """Runs a command with its options; what its function returns is the exit code."""
    ctrl_c = signal.getsignal(signal.SIGINT)
    if isinstance(command, _WITHOUT_PARTIAL_FILES) and ctrl_c is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # raises, as usual in Python
    with contextlib.suppress(OSError):  # there is none, or it is switched off
        native.chosen_level()  # refuses a wrong STREE_JAX_NATIVE
    _, function = _COMMANDS[type(command)]
    raise typer.Exit(pkgutil.resolve_name(f"stree_jax.cli.{function}")(command) or 0)


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
    result_callback=_run,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print("stree-jax", __version__)  # noqa: T201
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: bool = options.flag(
        "--version",
        help="Show the version.",
        callback=_show_version,
        is_eager=True,
        expose_value=False,
    ),
) -> None:
    pass


for _options, (_name, _) in _COMMANDS.items():
    app.command(_name)(_options)


def main() -> None:
    """Runs the command and prints warnings and user errors as one line."""
    warnings.formatwarning = lambda message, *_, **__: f"stree-jax: warning: {message}\n"
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a character
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.exit(app(standalone_mode=False))
    except (typer.Abort, KeyboardInterrupt):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # without the interpreter's teardown, which crashes amid a compilation
    except (ValueError, FloatingPointError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            file = error.filename2 or error.filename  # of a copy the second is the new one
            if file is None and error.errno == errno.ENOSPC:  # what writes a file names it
                file = "the standard output"
            if file is not None:  # which may be very long
                message = f"{shown_path(str(file))}: {error.strerror}"
        _refuse(" ".join(message.split()))
    except BaseException as error:
        # Usage errors are ClickExceptions, recognized by their method because new versions of typer
        # vendor click under a private name.
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            _refuse("out of memory")
        elif type(error).__name__ == "PanicException":  # of the tokenizers package
            _refuse(first_line(error))
        elif hasattr(error, "format_message"):
            _refuse(" ".join(error.format_message().split()))  # empty after --help
        else:
            raise


def _refuse(message: str) -> NoReturn:
    if message:
        print(f"stree-jax: error: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(2)
