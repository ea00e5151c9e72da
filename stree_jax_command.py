"""The `stree-jax` command. Outside the library, whose import takes a second or more."""

import os
import signal
import sys
from typing import Any, NoReturn


def leave(*_: Any) -> NoReturn:
    """Ends the process at once, with the exit code of Ctrl-C and no output but what was written.

    Amid an import, a compilation or in a thread that reads weights, KeyboardInterrupt surfaces as
    other errors, warnings or a crash.
    """
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h\n")  # a progress bar hides the cursor
    os._exit(130)


def main() -> None:
    """Imports the library and runs the command; commands that clean up take Ctrl-C over."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
        signal.signal(signal.SIGINT, leave)
    from stree_jax.cli.main import main as run

    run()
