"""`stree-jax generate --prompts`: continues the prompts of a file, several at a time."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import stree_jax as st
from stree_jax.cli.generate import Loaded, check_seed, encoded
from stree_jax.cli.options import DEFAULTS
from stree_jax.decoding.options import MAX_TOKENS, plan


class _Line(NamedTuple):
    """A line of the prompts file: a request, or its error."""

    number: int  # from 1
    prompt: str
    request: st.Request | None
    error: str = ""


def run_batch(
    console: Console,
    loaded: Loaded,
    settings: dict[str, Any],
    *,
    prompts: Path,
    output: Path,
    rows: int,
    verifier: str | None,
    seed: int,
    max_length: int | None,
    fingerprint: dict[str, Any],
) -> int:
    """Decodes the prompts that the output lacks, and appends each text as it ends.

    A line's random key is that of the seed with the line's number folded in, so its text depends
    neither on the other lines nor on interruptions.

    Args:
        console: console for the progress bar, bad lines and the summary.
        loaded: models and tokenizer.
        settings: options of a text, which a line may override.
        prompts: file of JSON objects with a "prompt" and optional settings.
        output: file of JSON objects with "line", "prompt", "text" and counts, as texts end.
        rows: number of prompts that decode at the same time.
        verifier, max_length: see `generate`.
        seed: default random seed of a line.
        fingerprint: all options that may change a text.

    Returns:
        The number of lines with errors.

    Raises:
        ValueError: a file that cannot be read or written, or an output of other options or prompts.
    """
    try:
        text = prompts.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {prompts} cannot be read: {error}") from None
    drafts: dict[str, Any] = {
        "drafter": loaded.drafter,
        "topology": loaded.topology,
        "verifier": verifier,
    }
    plan(loaded.model, [[0]], **drafts, **settings, key=jax.random.key(seed))  # checks them
    lines = [
        _parsed(loaded, number, line, seed, settings)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    run = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:12]
    finished = _finished(output, run, {line.number: line.prompt for line in lines})
    limit = max_length or loaded.model.config.max_length
    lengths = [_length(line.request) for line in lines if line.request]
    longest = max((length for length in lengths if length <= MAX_TOKENS), default=2)
    scheduler = st.Scheduler(
        loaded.model,
        rows=rows,
        max_length=longest if limit is None else min(limit, max(longest, 2)),
        **drafts,
    )
    waiting = iter([line for line in lines if line.number not in finished])
    num_bad = num_tokens = num_calls = num_done = 0
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"))
    with (
        Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress,
        output.open("a", encoding="utf-8") as file,
    ):
        task = progress.add_task("", total=len(lines), completed=len(finished))
        running: dict[int, _Line] = {}

        def report(line: _Line, error: str) -> None:
            nonlocal num_bad
            num_bad += 1
            message = " ".join(error.split())
            console.print(f"{prompts}, line {line.number}: {message}", markup=False, soft_wrap=True)
            progress.advance(task)

        def feed() -> None:
            """Keeps enough requests waiting for all rows."""
            while scheduler.num_waiting < rows and (line := next(waiting, None)):
                if line.request is None:
                    report(line, line.error)
                    continue
                try:
                    running[scheduler.submit(line.request)] = line
                except ValueError as error:
                    report(line, str(error))

        def completions() -> Iterator[st.Completion]:
            feed()
            for completion in scheduler.completions():
                yield completion
                feed()

        for completion in completions():
            line = running.pop(completion.request_id)
            if completion.error:
                report(line, completion.error)
                continue
            stats = completion.stats
            record = {
                "line": line.number,
                "prompt": line.prompt,
                "text": loaded.tokenizer.decode(completion.tokens),
                "num_tokens": stats.num_tokens,
                "num_target_calls": stats.num_target_calls,
                "run": run,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            num_done += 1
            num_tokens += stats.num_tokens
            num_calls += stats.num_target_calls
            progress.advance(task)
    before = f", {len(finished)} were there before" if finished else ""
    bad = f", {num_bad} lines could not be used" if num_bad else ""
    tau = f", tau {num_tokens / num_calls:.2f}" if num_calls else ""
    console.print(
        f"{output}: {num_done} texts of {num_tokens} tokens{tau}{before}{bad}",
        markup=False,
        soft_wrap=True,
    )
    return num_bad


def _length(request: st.Request) -> int:
    return len(request.prompt) + request.max_new_tokens


def _parsed(loaded: Loaded, number: int, line: str, seed: int, defaults: dict[str, Any]) -> _Line:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _Line(number, "", None, f"not JSON: {error}")
    prompt = content.get("prompt") if isinstance(content, dict) else None
    if not isinstance(prompt, str):
        return _Line(number, "", None, 'not an object with a "prompt" that is a text')
    try:
        own = defaults | {name: content[name] for name in DEFAULTS if name in content}
        own_seed = content.get("seed", seed)
        check_seed(own_seed, "seed")
        key = jax.random.fold_in(jax.random.key(own_seed), number)
        request = st.Request(encoded(loaded, prompt, "the prompt"), key=key, **own)
    except ValueError as error:
        return _Line(number, prompt, None, str(error))
    return _Line(number, prompt, request)


def _finished(output: Path, run: str, prompts: dict[int, str]) -> set[int]:
    """Lines in the output; a line that an interrupted run left incomplete is removed.

    Raises:
        ValueError: the output is not a file of this command, or belongs to another run.
    """
    if not output.exists():
        if not output.parent.is_dir():
            raise ValueError(f"--output {output}: the folder {output.parent} does not exist")
        return set()
    way_out = "name another file, or delete it"
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    numbers = set()
    for at, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            number, prompt, made_by = record["line"], record["prompt"], record["run"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(
                f"--output {output}, line {at} is no output of this command; {way_out}"
            ) from None
        if made_by != run:
            raise ValueError(f"--output {output} was made with other options; {way_out}")
        if prompts.get(number) != prompt:
            raise ValueError(f"--output {output} has another prompt for line {number}; {way_out}")
        numbers.add(number)
    if len(whole) < len(content):
        if not numbers and not content.startswith(b'{"line": '):
            raise ValueError(f"--output {output} is no output of this command; {way_out}")
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return numbers
