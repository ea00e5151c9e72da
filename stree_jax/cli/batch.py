"""`stree-jax generate --prompts`: continues the prompts of a file, several at a time."""

import dataclasses
import functools
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
from stree_jax.checks import check_int
from stree_jax.cli.generate import Loaded, check_seed, under
from stree_jax.cli.memory import free_memory, row_bytes
from stree_jax.cli.options import DEFAULTS, Wanted, wanted
from stree_jax.cli.prompts import prompt_of, read_lines, record_of
from stree_jax.cli.records import open_records
from stree_jax.decoding.drafters.base import draft_models
from stree_jax.decoding.options import plan
from stree_jax.decoding.prompts import MAX_TOKENS, buffer_size
from stree_jax.mesh.hosts import by_first
from stree_jax.messages import shown


class _Line(NamedTuple):
    """A line of the prompts file: a request and how many texts of it, or its error."""

    number: int  # from 1
    source: dict[str, Any]  # its "prompt", or its "messages"
    request: st.Request | None
    error: str = ""
    asked: Wanted | None = None

    @property
    def num_texts(self) -> int:
        """How many texts of its prompt."""
        return 1 if self.asked is None else self.asked.num_texts

    def requests(self) -> Iterator[st.Request]:
        """A request for each text; all but the first fold their index into the line's key."""
        assert self.request is not None
        assert self.request.key is not None
        yield self.request
        for i in range(1, self.num_texts):
            yield dataclasses.replace(self.request, key=jax.random.fold_in(self.request.key, i))


def run_batch(
    console: Console,
    loaded: Loaded,
    settings: dict[str, Any],
    *,
    prompts: Path,
    output: Path | None,
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
        prompts: file of JSON objects with a "prompt" or "messages", and optional settings.
        output: file of JSON objects with "line", the prompt, "text" and counts, as texts end; with
            several texts of a prompt "texts", a list of objects. None: the standard output.
        rows: number of prompts that decode at the same time.
        verifier, max_length: see `generate`.
        seed: default random seed of a line.
        fingerprint: all options that may change a text.

    Returns:
        The number of lines with errors.

    Raises:
        ValueError: a file that cannot be read or written, an output of other options or prompts, or
            more rows than fit into memory.
    """
    check_int("--rows", rows, 1)
    texts = json.loads(by_first(lambda: json.dumps(_read(prompts))))
    drafts: dict[str, Any] = {
        "drafter": loaded.drafter,
        "topology": loaded.topology,
        "verifier": verifier,
    }
    asked = wanted(settings)
    made = _Grammars(loaded)
    plan(  # checks them
        loaded.model,
        [[0]],
        **drafts,
        **asked.options,
        **made.options(asked),
        key=jax.random.key(seed),
        tokenizer=loaded.texts.tokenizer(""),
    )
    lines = [
        _parsed(loaded, number, line.encode("latin-1"), seed, settings) for number, line in texts
    ]
    partition = loaded.model.partition
    if partition.shards > 1:  # which sum in another order
        fingerprint = fingerprint | {"shards": partition.shards}
    run = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:12]
    limit = min(max_length or loaded.model.config.max_length or MAX_TOKENS, MAX_TOKENS)
    lines, rows = _fitting(loaded, made.of_lines(lines), rows, limit)
    lengths = [_length(line.request) for line in lines if line.request]
    longest = max((length for length in lengths if length <= limit), default=2)
    scheduler = st.Scheduler(loaded.model, rows=rows, max_length=max(longest, 2), **drafts)
    num_bad = num_tokens = num_calls = num_done = 0
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"))
    with (
        Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress,
        open_records(output, run, {line.number: line.source for line in lines}) as (
            write,
            finished,
        ),
    ):
        waiting = iter([line for line in lines if line.number not in finished])
        task = progress.add_task("", total=len(lines), completed=len(finished))
        running: dict[int, _Line] = {}
        ended: dict[int, dict[int, st.Completion]] = {}  # by line and request

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
                    for request in line.requests():
                        running[scheduler.submit(request)] = line
                except ValueError as error:  # of the first: the others are as long
                    report(line, str(error))

        def completions() -> Iterator[st.Completion]:
            feed()
            for completion in scheduler.completions():
                yield completion
                feed()

        for completion in completions():
            line = running.pop(completion.request_id)
            of_line = ended.setdefault(line.number, {})
            of_line[completion.request_id] = completion
            if len(of_line) < line.num_texts:
                continue
            texts = [of_line[request_id] for request_id in sorted(of_line)]
            del ended[line.number]
            if errors := [text.error for text in texts if text.error]:
                report(line, errors[0])
                continue
            records = [_record(loaded, text) for text in texts]
            content = records[0] if line.num_texts == 1 else {"texts": records}
            write({"line": line.number} | line.source | content)
            num_done += 1
            num_tokens += sum(text.stats.num_tokens for text in texts)
            num_calls += sum(text.stats.num_target_calls for text in texts)
            progress.advance(task)
    before = f", {len(finished)} were there before" if finished else ""
    bad = f", {num_bad} lines could not be used" if num_bad else ""
    tau = f", tau {num_tokens / num_calls:.2f}" if num_calls else ""
    console.print(
        f"{output or prompts}: {num_done} texts of {num_tokens} tokens{tau}{before}{bad}",
        markup=False,
        soft_wrap=True,
    )
    return num_bad


def _read(prompts: Path) -> list[tuple[int, str]]:
    """The lines; their bytes as characters, so that one that is no UTF-8 ends alone."""
    return [(number, line.decode("latin-1")) for number, line in read_lines(prompts)]


def _record(loaded: Loaded, completion: st.Completion) -> dict[str, Any]:
    """The output record of a text."""
    tokens, reason = completion.tokens, completion.finish_reason
    record: dict[str, Any] = {
        "text": loaded.texts.without_end(completion.text or "", tokens, reason),
        "finish_reason": reason,
        "num_tokens": completion.stats.num_tokens,
        "num_target_calls": completion.stats.num_target_calls,
    }
    if completion.log_probs is not None:
        record |= {"tokens": tokens, "log_probs": completion.log_probs}
    return record


def _length(request: st.Request) -> int:
    return len(request.prompt) + request.max_new_tokens


def _fitting(loaded: Loaded, lines: list[_Line], rows: int, limit: int) -> tuple[list[_Line], int]:
    """The lines, with an error where memory does not suffice, and the number of rows.

    There are at most as many rows as requests; on a mesh each shard has the same number. Requests
    beyond `limit` are left to the scheduler.

    Raises:
        ValueError: no request fits.
    """
    requests = [line.request for line in lines if line.request]
    partition = loaded.model.partition
    data = partition.rows
    rows = -(-max(min(rows, len(requests)), 1) // data) * data
    lengths = [length for length in map(_length, requests) if length <= limit]
    free = json.loads(by_first(lambda: json.dumps(free_memory(partition.num_local_devices))))
    models = [loaded.model, *draft_models(loaded.drafter)]

    @functools.cache
    def needed(places: int) -> int:
        return row_bytes(models, places)

    def too_much(length: int) -> str:
        size = needed(buffer_size(length)) * rows // data
        if free is None or size <= free:
            return ""
        return (
            f"rows of {length} tokens take {size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free"
        )

    if lengths and (error := too_much(min(lengths))):
        raise ValueError(f"--rows {rows} is too many: {error}; lower it")
    for i, line in enumerate(lines):
        length = _length(line.request) if line.request else 0
        if 0 < length <= limit and (error := too_much(length)):
            error = f"{rows} {error}; lower max_new_tokens or --rows"
            lines[i] = line._replace(request=None, error=error)
    return lines, rows


class _Grammars:
    """The grammars of lines, each compiled once."""

    def __init__(self, loaded: Loaded):
        self._loaded = loaded
        self._made: dict[str, st.Automaton | ValueError] = {}

    def options(self, asked: Wanted) -> dict[str, Any]:
        """What ends a text, and its grammar if it has one.

        Raises:
            ValueError: a bad grammar, or no end token.
        """
        ends = self._loaded.texts.end_tokens(self._loaded.model.config, asked.eos_token)
        options: dict[str, Any] = {"eos_token": ends or None}
        if asked.grammar is not None:
            key = json.dumps([asked.grammar, ends])
            if key not in self._made:
                try:
                    self._made[key] = under(asked.grammar, self._loaded, ends)
                except ValueError as error:
                    self._made[key] = error
            found = self._made[key]
            if isinstance(found, ValueError):
                raise found
            options["processors"] = [found]
        return options

    def of_lines(self, lines: list[_Line]) -> list[_Line]:
        """The lines with these options in their requests; a bad grammar is its line's error."""
        found: list[_Line] = []
        for line in lines:
            if line.request is not None and line.asked is not None:
                try:
                    options = self.options(line.asked)
                    line = line._replace(request=dataclasses.replace(line.request, **options))
                except ValueError as error:
                    line = line._replace(request=None, error=str(error))
            found.append(line)
        # Requests share the tables of those that are used.
        used = {id(one): one for line in found if line.request for one in line.request.processors}
        joined = dict(zip(used, st.Automaton.joined([*used.values()]), strict=True)) if used else {}
        for i, line in enumerate(found):
            if line.request is not None and line.request.processors:
                own = [joined[id(one)] for one in line.request.processors]
                found[i] = line._replace(request=dataclasses.replace(line.request, processors=own))
        return found


def _parsed(loaded: Loaded, number: int, line: bytes, seed: int, defaults: dict[str, Any]) -> _Line:
    source: dict[str, Any] = {}
    try:
        content = record_of(line)
        source = {name: content[name] for name in ("prompt", "messages") if name in content}
        asked = wanted(defaults, {name: content[name] for name in DEFAULTS if name in content})
        own_seed = content.get("seed", seed)
        check_seed(own_seed, "seed")
        chat = content.get("chat")
        if chat is not None and not isinstance(chat, dict):
            raise ValueError(f"chat must be an object, the template's variables, got {shown(chat)}")
        prompt = prompt_of(content)
        request = st.Request(
            loaded.texts.tokens(prompt, special=asked.bos, chat=chat, name="the prompt"),
            key=jax.random.fold_in(jax.random.key(own_seed), number),
            tokenizer=loaded.texts.tokenizer(prompt),
            **asked.options,
        )
    except ValueError as error:
        return _Line(number, source, None, str(error))
    return _Line(number, source, request, "", asked)
