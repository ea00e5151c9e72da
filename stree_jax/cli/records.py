"""The output of `generate --prompts`: a JSON line for each text, from which a later run resumes."""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from stree_jax.checkpoint.directories import try_lock
from stree_jax.mesh.hosts import by_first

Record = dict[str, Any]
_WAY_OUT = "name another file, or delete it"


@contextlib.contextmanager
def open_records(
    output: Path | None, run: str, prompts: dict[int, Record]
) -> Iterator[tuple[Callable[[Record], None], set[int]]]:
    """A function that appends a record, and the numbers of the lines that the output has already.

    All processes of a mesh call this; the first one reads and writes the file, the others write
    nothing.

    The output is locked until the block ends or the process does. A record that an interrupted run
    left incomplete is removed.

    Args:
        output: the file; None: the standard output.
        run: digest of the options, which all records have.
        prompts: the prompt of each line, as its record has it.

    Raises:
        ValueError: another run writes to the file, or it is not the output of this command for
            these prompts and options, as it wrote it.
    """
    with contextlib.ExitStack() as stack:
        files: list[IO[bytes]] = []  # in the process that writes

        def opened() -> str:
            file, finished = _opened(stack, output, run, prompts)
            files.append(file)
            return json.dumps(sorted(finished))

        finished = {*json.loads(by_first(opened))}

        def write(record: Record) -> None:
            record = record | {"run": run}
            record["digest"] = _digest(record)
            try:
                for file in files:
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    file.flush()
            except OSError as error:  # of a full disk, it names no file
                error.filename = str(output or "the standard output")
                raise

        yield write, finished


def _opened(
    stack: contextlib.ExitStack, output: Path | None, run: str, prompts: dict[int, Record]
) -> tuple[IO[bytes], set[int]]:
    """The file, locked until the end of `stack`, and the numbers of its lines."""
    if output is None:
        return sys.stdout.buffer, set()
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: the folder {output.parent} does not exist")
    is_regular = output.is_file() or not output.exists()
    file = stack.enter_context(output.open("ab"))
    if not is_regular:
        return file, set()
    if not try_lock(file.fileno()):
        raise ValueError(
            f"--output {output}: another run is writing it; wait, or name another file"
        )
    return file, _finished(output, run, prompts)


def _digest(record: Record) -> str:
    content = {name: value for name, value in record.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _finished(output: Path, run: str, prompts: dict[int, Record]) -> set[int]:
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    numbers = set()
    for at, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            number, made_by = record["line"], record["run"]
            is_ours = type(number) is int
        except (ValueError, TypeError, KeyError, RecursionError):
            is_ours = False
        if not is_ours:
            raise ValueError(
                f"--output {output}, line {at} is no output of this command; {_WAY_OUT}"
            )
        if made_by != run:
            raise ValueError(f"--output {output} was made with other options; {_WAY_OUT}")
        prompt = prompts.get(number)
        if not prompt or any(record.get(name) != value for name, value in prompt.items()):
            raise ValueError(f"--output {output} has another prompt for line {number}; {_WAY_OUT}")
        if record.get("digest") != _digest(record):
            raise ValueError(
                f"--output {output}, line {at} is not as it was written; delete that line to have"
                " its text decoded again"
            )
        numbers.add(number)
    if len(whole) < len(content):
        if not numbers and not b'{"line": '.startswith(content[:9]):
            raise ValueError(f"--output {output} is no output of this command; {_WAY_OUT}")
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return numbers
