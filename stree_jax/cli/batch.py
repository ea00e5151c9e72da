"""`stree-jax generate --prompts`: continues the prompts of a file, several at a time."""

import collections
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
from rich.console import Console

import stree_jax as st
from stree_jax.checks import check_int
from stree_jax.cli.loading import Loaded
from stree_jax.cli.options import Generate, wanted
from stree_jax.cli.prompts import prompt_of, read_lines
from stree_jax.decoding.plan import plan
from stree_jax.decoding.prompts import MAX_TOKENS, typed_key
from stree_jax.measuring.report import progress_bar
from stree_jax.messages import shown

Record = dict[str, Any]
_SOURCE = "number", "prompt", "messages"  # of a line: what its output has too


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
    lines = _lines(loaded, command, settings)
    count = collections.Counter[str]()
    with _opened(command.output, {line.number: line.source for line in lines}) as (file, last):
        waiting = [line for line in lines if line.number > last]
        with progress_bar(console) as show:
            for done, (line, texts, error) in enumerate(decoded(loaded, command, waiting, rows), 1):
                show("decoding prompts", done, len(waiting))
                if error:
                    message = f"{command.prompts}, line {line.number}: {' '.join(error.split())}"
                    console.print(message, markup=False, soft_wrap=True)
                    count["bad"] += 1
                    continue
                records = [_record(loaded, text) for text in texts]
                own = records[0] if len(records) == 1 else {"texts": records}
                record = {"line": line.number} | line.source | own
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()
                count["texts"] += 1
                count["tokens"] += sum(text.stats.num_tokens for text in texts)
                count["calls"] += sum(text.stats.num_target_calls for text in texts)
    summary = f"{command.output or command.prompts}: {count['texts']} texts"
    summary += f" of {count['tokens']} tokens"
    summary += f", tau {count['tokens'] / count['calls']:.2f}" if count["calls"] else ""
    summary += f", after line {last}, which was there before" if last else ""
    summary += f", {count['bad']} lines could not be used" if count["bad"] else ""
    console.print(summary, markup=False, soft_wrap=True)
    return count["bad"]


def _lines(loaded: Loaded, command: Generate, settings: dict[str, Any]) -> list[Line]:
    """Returns the lines of the file; requests share the tables of their grammars."""
    path: Any = command.prompts
    lines = read_lines(path)
    options = loaded.options(wanted(settings)) | {"key": command.seed}
    plan(  # refuses what is wrong for all lines
        loaded.model,
        [[0]],
        drafter=loaded.drafter,
        topology=loaded.topology,
        verifier=command.verifier,
        tokenizer=loaded.texts.tokenizer(""),
        **options,
    )
    found = [_parsed(loaded, number, line, command.seed, settings) for number, line in lines]
    grammars = {id(g): g for line in found for each in line.requests for g in each.processors}
    if not grammars:
        return found
    joined = dict(zip(grammars, st.Automaton.joined([*grammars.values()]), strict=True))

    def sharing(request: st.Request) -> st.Request:
        return dataclasses.replace(request, processors=[joined[id(g)] for g in request.processors])

    return [line._replace(requests=[*map(sharing, line.requests)]) for line in found]


def _parsed(loaded: Loaded, number: int, line: bytes, seed: int, settings: dict[str, Any]) -> Line:
    source: Record = {}
    try:
        prompt, content = prompt_of(line)
        source = {name: content[name] for name in _SOURCE if name in content}
        asked = wanted(settings, content)
        own_seed = check_int("seed", content.get("seed", seed), 0, 2**32 - 1)
        chat = content.get("chat")
        if chat is not None and not isinstance(chat, dict):
            raise ValueError(f"chat must be an object, the template's variables, got {shown(chat)}")
        place = check_int("number", content.get("number", number), 0, 2**32 - 1)
        key: Any = jax.random.fold_in(typed_key(own_seed), place)
        first = st.Request(
            loaded.texts.tokens(prompt, special=asked["bos"], chat=chat, name="the prompt"),
            key=key,
            tokenizer=loaded.texts.tokenizer(prompt),
            **loaded.options(asked),
        )
        keys = [jax.random.fold_in(key, i) for i in range(1, asked["n"])]
        others = [dataclasses.replace(first, key=each) for each in keys]
        return Line(number, source, [first, *others])
    except ValueError as error:
        return Line(number, source, error=str(error))


@contextlib.contextmanager
def _opened(output: Path | None, sources: Mapping[int, Record]) -> Iterator[tuple[IO[bytes], int]]:
    """Yields the file to append to, and the number of the last line that is whole in it."""
    if output is None:
        yield sys.stdout.buffer, 0
        return
    with output.open("a+b") as file:
        file.seek(0)
        whole, newline, rest = file.read().rpartition(b"\n")
        number, begins = 0, b'{"line": '
        try:
            record = json.loads(whole[whole.rfind(b"\n") + 1 :]) if newline else {"line": 0}
            number = record["line"]
            is_ours = type(number) is int and begins.startswith(rest[: len(begins)])
        except (ValueError, TypeError, KeyError, RecursionError):
            is_ours = False
        if not is_ours:
            raise ValueError(
                f"--output {output} is no output of this command; name another file, or delete it"
            )
        source = sources.get(number)
        if newline and (not source or any(record.get(k) != v for k, v in source.items())):
            raise ValueError(
                f"--output {output} ends with another prompt than line {number} of the prompts;"
                " name another file, or delete it"
            )
        if rest:  # of a run that was interrupted
            file.truncate(len(whole + newline))
        yield file, number


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
        drafter=loaded.drafter,
        topology=loaded.topology,
        verifier=command.verifier,
    )
    waiting = iter(lines)
    asked: collections.deque[tuple[Line, list[int], str]] = collections.deque()
    ended: dict[int, st.Completion] = {}

    def submit() -> None:
        """Keeps enough requests waiting for all rows."""
        while scheduler.num_waiting < rows and (line := next(waiting, None)):
            ids, error = [], line.error
            try:
                ids = [scheduler.submit(request) for request in line.requests]
            except ValueError as refusal:  # of the first: the others are as long
                error = str(refusal)
            asked.append((line, ids, error))

    submit()
    while asked:
        line, ids, error = asked.popleft()
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
