"""`stree-jax generate --prompts`: continues the prompts of a file, several at a time."""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from rich import progress as bars
from rich.console import Console

import stree_jax as st
from stree_jax.checks import check_int
from stree_jax.cli.loading import Loaded, chosen
from stree_jax.cli.options import MAX_SEED, Generate, wanted
from stree_jax.cli.prompts import prompt_of, read_lines
from stree_jax.cli.records import Record, open_records
from stree_jax.decoding.drafters.base import draft_models
from stree_jax.decoding.plan import plan
from stree_jax.decoding.prompts import MAX_TOKENS, buffer_size, typed_key
from stree_jax.mesh.hosts import by_first
from stree_jax.messages import shown
from stree_jax.models.cache import init_cache
from stree_jax.models.lm import HybridLM


class _Line(NamedTuple):
    """A line of the prompts file: a request and how many texts of it, or its error."""

    number: int  # from 1
    source: Record  # its "prompt", or its "messages"
    request: st.Request | None = None
    num_texts: int = 1
    error: str = ""

    def requests(self) -> Iterator[st.Request]:
        """A request for each text; all but the first fold their index into the line's key."""
        if self.request is None:
            raise ValueError(self.error)
        key: Any = self.request.key
        yield self.request
        for i in range(1, self.num_texts):
            yield dataclasses.replace(self.request, key=jax.random.fold_in(key, i))

    @property
    def length(self) -> int:
        """Most tokens of a text; 0: there is none."""
        return 0 if self.request is None else len(self.request.prompt) + self.request.max_new_tokens


def run_batch(console: Console, loaded: Loaded, command: Generate, settings: dict[str, Any]) -> int:
    """Decodes the prompts that the output lacks, and appends each text as it ends.

    A line's random key is that of the seed with the line's number folded in, so its text depends
    neither on the other lines nor on interruptions. A line may override the settings of a text.

    Returns:
        The number of lines with errors.
    """
    wanted_rows = 8 if command.rows is None else command.rows
    check_int("--rows", wanted_rows, 1)
    lines = _lines(loaded, command, settings)
    limit = min(command.max_length or loaded.model.config.max_length or MAX_TOKENS, MAX_TOKENS)
    lines, rows = _fitting(loaded, lines, wanted_rows, limit)
    longest = max([2, *(line.length for line in lines if line.length <= limit)])
    scheduler = st.Scheduler(loaded.model, rows=rows, max_length=longest, **loaded.drafting)
    columns = bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn()
    left = bars.TextColumn("left:"), bars.TimeRemainingColumn()
    bar = bars.Progress(*columns, *left, console=console, transient=True)
    sources = {line.number: line.source for line in lines}
    records = open_records(command.output, _digest(loaded, command, settings), sources)
    count = collections.Counter[str]()
    with bar as progress, records as (write, finished):
        task = progress.add_task("", total=len(lines), completed=len(finished))
        waiting = [line for line in lines if line.number not in finished]
        for line, texts, error in _decoded(scheduler, waiting, rows):
            if error:
                message = f"{command.prompts}, line {line.number}: {' '.join(error.split())}"
                console.print(message, markup=False, soft_wrap=True)
                count["bad"] += 1
            else:
                of_texts = [_record(loaded, text) for text in texts]
                own = of_texts[0] if line.num_texts == 1 else {"texts": of_texts}
                write({"line": line.number} | line.source | own)
                count["texts"] += 1
                count["tokens"] += sum(text.stats.num_tokens for text in texts)
                count["calls"] += sum(text.stats.num_target_calls for text in texts)
            progress.advance(task)
    summary = f"{command.output or command.prompts}: {count['texts']} texts"
    summary += f" of {count['tokens']} tokens"
    summary += f", tau {count['tokens'] / count['calls']:.2f}" if count["calls"] else ""
    summary += f", {len(finished)} were there before" if finished else ""
    summary += f", {count['bad']} lines could not be used" if count["bad"] else ""
    console.print(summary, markup=False, soft_wrap=True)
    return count["bad"]


def _lines(loaded: Loaded, command: Generate, settings: dict[str, Any]) -> list[_Line]:
    """The lines of the file that process 0 has; requests share the tables of their grammars."""
    path: Any = command.prompts

    def read() -> str:  # bytes as characters, so that a line that is no UTF-8 ends alone
        return json.dumps([(number, line.decode("latin-1")) for number, line in read_lines(path)])

    content = json.loads(by_first(read))
    options = loaded.options(wanted(settings)) | {"key": command.seed}
    options |= loaded.drafting | {"tokenizer": loaded.texts.tokenizer("")}
    plan(loaded.model, [[0]], **options)  # refuses what is wrong for all lines
    lines = [
        _parsed(loaded, number, line.encode("latin-1"), command.seed, settings)
        for number, line in content
    ]
    own = {id(one): one for line in lines if line.request for one in line.request.processors}
    joined = dict(zip(own, st.Automaton.joined([*own.values()]), strict=True)) if own else {}
    for i, line in enumerate(lines):
        if line.request and line.request.processors:
            shared = [joined[id(one)] for one in line.request.processors]
            request = dataclasses.replace(line.request, processors=shared)
            lines[i] = line._replace(request=request)
    return lines


def _parsed(loaded: Loaded, number: int, line: bytes, seed: int, settings: dict[str, Any]) -> _Line:
    source: Record = {}
    try:
        prompt, content = prompt_of(line)
        source = {name: content[name] for name in ("prompt", "messages") if name in content}
        asked = wanted(settings, content)
        own_seed = check_int("seed", content.get("seed", seed), 0, MAX_SEED)
        chat = content.get("chat")
        if chat is not None and not isinstance(chat, dict):
            raise ValueError(f"chat must be an object, the template's variables, got {shown(chat)}")
        request = st.Request(
            loaded.texts.tokens(prompt, special=asked["bos"], chat=chat, name="the prompt"),
            key=jax.random.fold_in(typed_key(own_seed), number),
            tokenizer=loaded.texts.tokenizer(prompt),
            **loaded.options(asked),
        )
    except ValueError as error:
        return _Line(number, source, error=str(error))
    return _Line(number, source, request, asked["n"])


def _fitting(loaded: Loaded, lines: list[_Line], rows: int, limit: int) -> tuple[list[_Line], int]:
    """The lines, with an error where memory does not suffice, and the number of rows.

    There are at most as many rows as requests; on a mesh each shard has the same number. Requests
    beyond `limit` are left to the scheduler.
    """
    partition = loaded.model.partition
    data = partition.rows
    rows = -(-max(min(rows, sum(line.length > 0 for line in lines)), 1) // data) * data
    free = json.loads(by_first(lambda: json.dumps(free_memory(partition.num_local_devices))))
    models = [loaded.model, *draft_models(loaded.drafting["drafter"])]

    @functools.cache
    def needed(places: int) -> int:
        return row_bytes(models, places) * rows // data

    def too_much(length: int) -> str:
        size = needed(buffer_size(length))
        if free is None or size <= free:
            return ""
        return (
            f"rows of {length} tokens take {size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free"
        )

    lengths = [line.length for line in lines if 0 < line.length <= limit]
    if lengths and (error := too_much(min(lengths))):
        raise ValueError(f"--rows {rows} is too many: {error}; lower it")
    for i, line in enumerate(lines):
        if 0 < line.length <= limit and (error := too_much(line.length)):
            error = f"{rows} {error}; lower max_new_tokens or --rows"
            lines[i] = _Line(line.number, line.source, error=error)
    return lines, rows


def free_memory(num_devices: int) -> int | None:
    """Bytes that can be allocated on a device; None: unknown.

    Args:
        num_devices: devices of this process that are used; on a CPU they share the memory.
    """
    device = jax.local_devices()[0]
    if stats := device.memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024 // num_devices
    except (OSError, ValueError, KeyError):
        return None


def row_bytes(models: Sequence[HybridLM], length: int) -> int:
    """Bytes that one row of `length` tokens needs at least: its text, and the models' caches.

    On a mesh on each device of the row's shard.
    """

    def cache(model: HybridLM) -> Any:
        local = model.config.local(model.partition.shards)
        return init_cache(local, 1, length, model.activation_dtype)

    caches = jax.eval_shape(lambda: [cache(model) for model in models])
    return 4 * length + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))


def _digest(loaded: Loaded, command: Generate, settings: dict[str, Any]) -> str:
    """A digest of all that may change a text."""
    names = ["checkpoint", "adapter", "tree", "sharpness", "dtype", "quantize", "verifier", "seed"]
    options = {name: getattr(command, name) for name in names} | settings
    options["drafter"] = chosen(command.checkpoint, command)
    options["tokenizer"] = str(command.tokenizer)
    partition = loaded.model.partition
    if partition.shards > 1:  # which sum in another order
        options["shards"] = partition.shards
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def _decoded(
    scheduler: st.Scheduler, lines: Sequence[_Line], rows: int
) -> Iterator[tuple[_Line, list[st.Completion], str]]:
    """Decodes lines, and gives each when it ends: with its completions, or with an error."""
    waiting = iter(lines)
    running: dict[int, _Line] = {}
    ended: dict[int, dict[int, st.Completion]] = collections.defaultdict(dict)

    def refused() -> Iterator[tuple[_Line, list[st.Completion], str]]:
        """Keeps enough requests waiting for all rows; gives the lines that cannot be."""
        while scheduler.num_waiting < rows and (line := next(waiting, None)):
            try:
                for request in line.requests():
                    running[scheduler.submit(request)] = line
            except ValueError as error:  # of the first: the others are as long
                yield line, [], str(error)

    yield from refused()
    for completion in scheduler.completions():
        line = running.pop(completion.request_id)
        of_line = ended[line.number]
        of_line[completion.request_id] = completion
        if len(of_line) == line.num_texts:
            texts = [of_line[request_id] for request_id in sorted(of_line)]
            del ended[line.number]
            yield line, texts, next((text.error for text in texts if text.error), "")
        yield from refused()


def _record(loaded: Loaded, completion: st.Completion) -> Record:
    """The output record of a text."""
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
