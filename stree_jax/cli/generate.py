"""`stree-jax generate`: streams text from any checkpoint."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.style import Style

import stree_jax as st
from stree_jax import loading
from stree_jax.cli.batch import run_batch
from stree_jax.cli.options import Generate, wanted
from stree_jax.decoding.options import Options
from stree_jax.decoding.verifiers import LOSSY_VERIFIERS
from stree_jax.loading import WORDS, Loaded, sampling

_OF_PROMPTS = {
    "output": "its text is written to the terminal",
    "rows": "it is one text, or --n",
    "chat_template": "it is a text, not messages",
}
_OF_PROMPT = {
    "lossy": "its texts are always the target's",
    "show": "its texts are written as JSON lines",
    "distributed": "a file has one process",
}


def load(command: Generate) -> Loaded:
    """Loads models and tokenizer."""
    words = {name: value for name, value in vars(command).items() if name in WORDS}
    return loading.load(command.checkpoint, **words)


def run_generate(command: Generate) -> int:
    """Continues prompts; returns 1 if some of them could not be."""
    if (command.prompt is None) == (command.prompts is None):
        raise ValueError("give either --prompt TEXT or --prompts FILE.jsonl")
    kind, refused = ("prompts", _OF_PROMPT) if command.prompts else ("prompt", _OF_PROMPTS)
    for name, why in refused.items():
        if getattr(command, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} is not for --{kind}: {why}")
    if command.show and command.log_probs:
        raise ValueError("--show marks the tokens of texts, --log-probs lists them; give one")
    try:
        (command.prompt or "").encode()
    except UnicodeEncodeError:
        raise ValueError(
            "--prompt is not UTF-8; convert it, or check the terminal's locale"
        ) from None
    settings = command.settings()
    text_settings = wanted(settings)
    # Refuses before models are loaded.
    Options(**sampling(text_settings), max_length=command.max_length, key=command.seed)
    loaded = load(command)
    is_first = jax.process_index() == 0
    file = None if is_first else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if command.prompts is None:
        _continue(Console(highlight=False, file=file), loaded, command, text_settings)
        return 0
    console = Console(highlight=False, file=file, stderr=command.output is None)
    return 1 if run_batch(console, loaded, command, settings) else 0


def _continue(
    console: Console, loaded: Loaded, command: Generate, settings: dict[str, Any]
) -> None:
    """Prints a text as its tokens are accepted; several, or log-probabilities, when complete."""
    texts, prompt = loaded.texts, command.prompt or ""
    tokens = texts.tokens(prompt, special=settings["bos"], name="--prompt")
    options: dict[str, Any] = {
        **loaded.options(settings),
        **loaded.way,
        "tokenizer": texts.tokenizer(prompt),
        "key": command.seed,
        "max_length": command.max_length,
    }

    def write(text: str) -> None:
        # Bypasses rich, which wraps lines, expands tabs and replaces emoji codes.
        console.file.write(text)
        console.file.flush()

    head = Style(dim=True).render(prompt) if console.is_terminal else prompt
    if command.show or settings["log_probs"] or settings["n"] > 1:
        options |= {"n": settings["n"], "record_calls": command.show}
        out = st.generate(loaded.model, [tokens], **options)
        if command.show:
            write(f"{head}\n")
            out.show(console)
        else:
            _write_all(write, head, loaded, out)
        speed, num_tokens, calls = "", out.stats.num_tokens, out.stats.num_target_calls
    else:
        steps = st.stream(loaded.model, [tokens], **options)
        write(head)
        speed, num_tokens, calls = _write_steps(write, loaded, options["eos_token"] or (), steps)
    is_lossy = command.verifier in LOSSY_VERIFIERS
    label = f", LOSSY ({command.verifier}): not the target's own text" if is_lossy else ""
    console.print(
        f"{num_tokens} tokens, {calls} target calls, {speed}tau {num_tokens / calls:.2f}{label}",
        style="dim",
    )


def _write_all(write: Callable[[str], None], head: str, loaded: Loaded, out: st.Generation) -> None:
    """Writes texts, and the tokens of each as lines of JSON if they have log-probabilities."""
    assert out.texts is not None
    tokenizer = loaded.texts.tokenizer("")
    for row, (text, reason) in enumerate(zip(out.texts, out.finish_reasons, strict=True)):
        tokens = out.tokens[row, : out.lengths[row]].tolist()
        write(f"--- {row + 1} of {len(out.texts)}\n" if len(out.texts) > 1 else "")
        write(f"{head}{loaded.texts.without_end(text, tokens, reason)}\n")
        log_probs = [] if out.log_probs is None else out.log_probs[row].tolist()
        for token, log_prob in zip(tokens, log_probs, strict=False):
            record = {"token": token, "text": tokenizer.decode([token]), "log_prob": log_prob}
            write(json.dumps(record, ensure_ascii=False) + "\n")


def _write_steps(
    write: Callable[[str], None],
    loaded: Loaded,
    ends: Sequence[int],
    steps: Iterator[list[st.Piece]],
) -> tuple[str, int, int]:
    """Writes text as it comes. Returns the speed, and the numbers of tokens and of calls."""
    lengths, began = [], 0.0
    for (new,) in steps:
        began = began or time.perf_counter()  # the first step includes compilation
        lengths.append(len(new))
        reason = "end_token" if new and new[-1] in ends else ""
        write(loaded.texts.without_end(new.text or "", new, reason))
    write("\n")
    seconds = time.perf_counter() - began
    speed = f"{sum(lengths[1:]) / seconds:,.0f} tokens/s, " if lengths[1:] else ""
    return speed, sum(lengths), len(lengths)
