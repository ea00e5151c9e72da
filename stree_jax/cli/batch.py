"""`stree-jax generate --prompts`: continues the prompts of a file, several at a time."""

import collections
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
from rich.console import Console

import stree_jax as st
from stree_jax.checkpoint.directories import named_errors
from stree_jax.checks import check_int
from stree_jax.cli.options import Generate, wanted
from stree_jax.cli.prompts import SOURCE, prompt_of, read_lines, source_of
from stree_jax.decoding.plan import plan
from stree_jax.decoding.prompts import MAX_TOKENS, typed_key
from stree_jax.loading import Loaded
from stree_jax.measuring.report import progress_bar
from stree_jax.messages import shown

Record = dict[str, Any]
_BEGINS = b'{"line": '  # each record
_WAY_OUT = "name another file, or delete it"


class Line(NamedTuple):
    """A line of the prompts file: requests for its texts, or its error."""

    number: int  # from 1
    source: Record  # its "prompt", or its "messages"
    requests: Sequence[st.Request] = ()
    error: str = ""


def run_batch(console: Console, loaded: Loaded, command: Generate, settings: dict[str, Any]) -> int:
    """Decodes lines in their order, writes one for each, and returns how many have errors.

    A line's key is the seed's with the line's number folded in, or with its own "number", which is
    its place in a data set of several files: no text depends on other lines or on how it is split.
    """
    rows = 8 if command.rows is None else command.rows
    check_int("--rows", rows, 1)
    path: Any = command.prompts
    numbered = read_lines(path)
    lines = prepared(loaded, command, settings, numbered)
    count = collections.Counter[str]()
    with opened(command.output, numbered) as (file, there):
        waiting = [line for line in lines if line.number not in there]
        with progress_bar(console) as show:
            for done, record in enumerate(records(loaded, command, waiting, rows), 1):
                show("decoding prompts", done, len(waiting))
                write_record(file, record)
                if "error" in record:
                    message = f"{path}, line {record['line']}: {' '.join(record['error'].split())}"
                    console.print(message, markup=False, soft_wrap=True)
                    count["bad"] += 1
                    continue
                texts = record.get("texts", [record])
                count["texts"] += 1
                count["tokens"] += sum(text["num_tokens"] for text in texts)
                count["calls"] += sum(text["num_target_calls"] for text in texts)
    summary = f"{command.output or path}: {count['texts']} texts"
    summary += f" of {count['tokens']} tokens"
    summary += f", tau {count['tokens'] / count['calls']:.2f}" if count["calls"] else ""
    summary += f", {len(there)} lines were there before" if there else ""
    summary += f", {count['bad']} lines could not be used" if count["bad"] else ""
    console.print(summary, markup=False, soft_wrap=True)
    return count["bad"]


def prepared(
    loaded: Loaded,
    command: Generate,
    settings: dict[str, Any],
    numbered: Iterable[tuple[int, bytes]],
) -> list[Line]:
    """Returns lines as requests, which share the tables of their grammars."""
    options = loaded.options(wanted(settings)) | {"key": command.seed}
    plan(  # refuses what is wrong for all lines
        loaded.model,
        [[0]],
        **loaded.way,
        tokenizer=loaded.texts.tokenizer(""),
        **options,
    )
    lines = [_parsed(loaded, number, line, command.seed, settings) for number, line in numbered]
    grammars = {id(g): g for line in lines for r in line.requests for g in r.processors}
    if not grammars:
        return lines
    shared = dict(zip(grammars, st.Automaton.joined([*grammars.values()]), strict=True))

    def sharing(request: st.Request) -> st.Request:
        return dataclasses.replace(request, processors=[shared[id(g)] for g in request.processors])

    return [line._replace(requests=[*map(sharing, line.requests)]) for line in lines]


def _parsed(loaded: Loaded, number: int, line: bytes, seed: int, settings: dict[str, Any]) -> Line:
    source = source_of(line)
    try:
        prompt, content = prompt_of(line)
        text_settings = wanted(settings, content)
        seed = check_int("seed", content.get("seed", seed), 0, 2**32 - 1)
        chat = content.get("chat")
        if chat is not None and not isinstance(chat, dict):
            raise ValueError(f"chat must be an object, the template's variables, got {shown(chat)}")
        place = check_int("number", content.get("number", number), 0, 2**32 - 1)
        key: Any = jax.random.fold_in(typed_key(seed), place)
        first = st.Request(
            loaded.texts.tokens(prompt, special=text_settings["bos"], chat=chat, name="the prompt"),
            key=key,
            tokenizer=loaded.texts.tokenizer(prompt),
            **loaded.options(text_settings),
        )
        keys = [jax.random.fold_in(key, i) for i in range(1, text_settings["n"])]
        more = [dataclasses.replace(first, key=text_key) for text_key in keys]
        return Line(number, source, [first, *more])
    except ValueError as error:
        return Line(number, source, error=str(error))


@contextlib.contextmanager
def opened(
    output: Path | None, numbered: Iterable[tuple[int, bytes]]
) -> Iterator[tuple[IO[bytes], set[int]]]:
    """Yields the file to append to, and the numbers of the lines that it has already.

    Raises:
        ValueError: it is no output of these prompts.
    """
    if output is None:
        yield sys.stdout.buffer, set()
        return
    with named_errors(output), output.open("a+b") as file:
        file.seek(0)
        whole, newline, partial = file.read().rpartition(b"\n")
        try:
            there = [json.loads(line) for line in whole.splitlines()]
            numbers = [record["line"] for record in there]
            is_ours = all(type(number) is int for number in numbers)
        except (ValueError, TypeError, KeyError, RecursionError):
            is_ours = False
        if not (is_ours and _BEGINS.startswith(partial[: len(_BEGINS)])):
            raise ValueError(f"--output {output} is no output of this command; {_WAY_OUT}")
        lines = dict(numbered)
        for number, record in zip(numbers, there, strict=True):
            source = {name: record[name] for name in SOURCE if name in record}
            if number not in lines or source_of(lines[number]) != source:
                raise ValueError(
                    f"--output {output} has another prompt than line {number} of the prompts;"
                    f" {_WAY_OUT}, or that line of it"
                )
        if partial:  # of a run that was interrupted
            file.truncate(len(whole + newline))
        yield file, {*numbers}


def write_record(file: IO[bytes], record: Record) -> None:
    """Writes a line of output, at once."""
    text = json.dumps(record, ensure_ascii=False)
    file.write(text.encode(errors="backslashreplace") + b"\n")  # a lone surrogate as in JSON
    file.flush()


def records(
    loaded: Loaded, command: Generate, lines: Sequence[Line], rows: int
) -> Iterator[Record]:
    """Yields the record of each line, in their order: its texts, or its "error"."""
    for line, completions, error in decoded(loaded, command, lines, rows):
        texts = [_record(loaded, completion) for completion in completions]
        result = texts[0] if len(texts) == 1 else {"texts": texts}
        yield {"line": line.number} | line.source | ({"error": error} if error else result)


def decoded(
    loaded: Loaded, command: Generate, lines: Sequence[Line], rows: int
) -> Iterator[tuple[Line, list[st.Completion], str]]:
    """Yields lines in their order, each with its completions, or with an error."""
    limit = command.max_length or loaded.model.config.max_length or MAX_TOKENS
    requests = [request for line in lines for request in line.requests]
    lengths = [len(request.prompt) + request.max_new_tokens for request in requests]
    shards = loaded.model.partition.rows
    rows = -(-max(1, min(rows, len(requests))) // shards) * shards
    scheduler = st.Scheduler(
        loaded.model,
        rows=rows,
        max_length=max([2, *(length for length in lengths if length <= min(limit, MAX_TOKENS))]),
        **loaded.way,
    )
    waiting = iter(lines)
    submitted: collections.deque[tuple[Line, list[int], str]] = collections.deque()
    ended: dict[int, st.Completion] = {}

    def submit() -> None:
        """Keeps enough requests waiting for all rows."""
        while scheduler.num_waiting < rows and (line := next(waiting, None)):
            ids, error = [], line.error
            try:
                ids = [scheduler.submit(request) for request in line.requests]
            except ValueError as refusal:  # of the first: the others are as long
                error = str(refusal)
            submitted.append((line, ids, error))

    submit()
    while submitted:
        line, ids, error = submitted.popleft()
        for request_id in ids:
            while request_id not in ended:
                completion = next(scheduler.completions())
                ended[completion.request_id] = completion
                submit()
        texts = [ended.pop(request_id) for request_id in ids]
        yield line, texts, next((text.error for text in texts if text.error), error)
        submit()


def _record(loaded: Loaded, completion: st.Completion) -> Record:
    """Returns the output record of a text."""
    tokens, reason = completion.tokens, completion.finish_reason
    record: Record = {
        "text": loaded.texts.without_end(completion.text or "", tokens, reason),
        "finish_reason": reason,
        "num_tokens": completion.stats.num_tokens,
        "num_target_calls": completion.stats.num_target_calls,
    }
    if completion.log_probs is not None:
        record |= {"tokens": tokens, "log_probs": completion.log_probs}
    return record
