"""`stree-jax generate`: streams text from any checkpoint."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
from rich.console import Console
from rich.style import Style

import stree_jax as st
from stree_jax.checkpoint import tokenizer_errors
from stree_jax.checks import check_int
from stree_jax.cli.drafters import Chosen, ignored_fields, load_drafter
from stree_jax.cli.mesh import join_processes, parse_mesh
from stree_jax.cli.trees import parse_tree
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.convert import find
from stree_jax.decoding.grammar.api import end_tokens
from stree_jax.decoding.verifiers import LOSSY_VERIFIERS


class Loaded(NamedTuple):
    """Models and tokenizer of a command."""

    model: st.HybridLM
    drafter: st.Drafter | None
    topology: st.TreeTopology | None
    tokenizer: Any
    tokenizer_source: str
    output: IO[str] | None = None  # None: standard output


def load(
    *,
    checkpoint: str,
    drafter: Chosen,
    tree: str | None,
    sharpness: float | None,
    dtype: str,
    tokenizer_path: Path | None,
    mesh: str | None = None,
    distributed: bool = False,
) -> Loaded:
    """Loads models and tokenizer for `generate`.

    Only process 0 writes to the standard output.

    Raises:
        ValueError: an argument is invalid.
    """
    topology = None if tree is None else parse_tree(tree)
    if tree is not None and topology is None:  # the tuned result: do not draft
        drafter = Chosen(ignore=drafter.ignore)
    kind = "" if tree is None else tree.partition(":")[0]
    if sharpness is not None and (kind != "budget" or not drafter.chooses_shape):
        raise ValueError(
            "--sharpness is for dynamic trees: give --tree budget:16,5 and --draft, --mtp or"
            " --eagle3 with it"
        )
    if kind in ("beam", "budget") and drafter.option is not None and not drafter.chooses_shape:
        raise ValueError(
            f"--tree {tree}: only a draft model chooses the shape of its tree; use --draft, --mtp"
            " or --eagle3, or another tree such as branching:3,2,1"
        )
    if mesh is not None and drafter.is_head:
        raise ValueError(
            f"--mesh {mesh:.80}: heads draft on one device; leave --mesh out, or draft with --draft"
            " or --ngram"
        )
    ignore, of_drafter = ignored_fields(drafter.ignore, checkpoint, drafter.path)
    drafter = drafter._replace(ignore=of_drafter)
    tokenizer = st.load_tokenizer(tokenizer_path or find(checkpoint))
    enable_compilation_cache()
    if distributed:
        join_processes()
    where = None if mesh is None else parse_mesh(mesh)
    model = st.from_pretrained(checkpoint, dtype=dtype, ignore=ignore, mesh=where)
    output = open(os.devnull, "w") if distributed and jax.process_index() > 0 else None  # noqa: SIM115
    return Loaded(
        model,
        load_drafter(drafter, model, kind, sharpness),
        topology,
        tokenizer,
        str(tokenizer_path or checkpoint),
        output,
    )


def check_seed(seed: object, name: str) -> None:
    """Refuses seeds that jax takes modulo 2**32 or raises OverflowError for."""
    check_int(name, seed, 0, 2**32 - 1)


def encoded(loaded: Loaded, prompt: str, name: str) -> list[int]:
    """The tokens of a prompt.

    Raises:
        ValueError: there are none, or the tokenizer cannot encode it; `name` is the prompt's.
    """
    with tokenizer_errors(f"the tokenizer of {loaded.tokenizer_source} cannot encode {name}"):
        tokens = loaded.tokenizer.encode(prompt, add_special_tokens=False).ids
    if not prompt:
        raise ValueError(f"{name} is empty; give at least one character")
    if not tokens:
        raise ValueError(f"the tokenizer of {loaded.tokenizer_source} gives no tokens for {name}")
    return tokens


def under(loaded: Loaded, grammar: tuple[str, Any] | None) -> dict[str, Any]:
    """The options of a text under a grammar, see `Wanted.grammar`; none without one.

    Raises:
        ValueError: a bad grammar.
    """
    if grammar is None:
        return {}
    name, argument = grammar
    make = {"regex": st.regex, "json_schema": st.json_schema}[name]
    ends = end_tokens(loaded.tokenizer, loaded.model.config.eos_token)
    return {
        "processors": [make(argument, loaded.tokenizer, eos_token=ends)],
        "eos_token": ends,
    }


def run_generate(
    console: Console,
    loaded: Loaded,
    text: st.Options,
    *,
    prompt: str,
    num_texts: int,
    verifier: str | None,
    lossy: bool,
) -> None:
    """Decodes, and prints tokens as they are accepted.

    Texts with stops, of which a last part may be cut, with log-probabilities, and several of a
    prompt are printed when they are complete.

    Raises:
        ValueError: an argument is invalid.
        FloatingPointError: logits are not finite.
    """
    tokens = encoded(loaded, prompt, "--prompt")
    drafts: dict[str, Any] = {
        "drafter": loaded.drafter,
        "topology": loaded.topology,
        "verifier": verifier,
        "lossy": lossy,
    }

    def write(text: str) -> None:
        # Bypasses rich, which wraps lines, expands tabs and replaces emoji codes.
        console.file.write(text)
        console.file.flush()

    head = Style(dim=True).render(prompt) if console.is_terminal else prompt
    if text.stop or text.log_probs or num_texts > 1:
        out = st.generate(loaded.model, [tokens], n=num_texts, **drafts, **text)
        _write_all(write, head, loaded.tokenizer, out)
        speed, num_tokens, calls = "", out.stats.num_tokens, out.stats.num_target_calls
    else:
        steps = st.stream(loaded.model, [tokens], **drafts, **text)
        speed, num_tokens, calls = _write_steps(write, head, loaded.tokenizer, steps)
    label = (
        f", LOSSY ({verifier}): not the target's own text"
        if verifier and verifier in LOSSY_VERIFIERS
        else ""
    )
    console.print(
        f"{num_tokens} tokens, {calls} target calls, {speed}tau {num_tokens / calls:.2f}{label}",
        style="dim",
    )


def _write_all(write: Callable[[str], None], head: str, tokenizer: Any, out: st.Generation) -> None:
    """Writes texts, and the tokens of each as lines of JSON if they have log-probabilities."""
    assert out.texts is not None
    for row, text in enumerate(out.texts):
        write(f"--- {row + 1} of {len(out.texts)}\n" if len(out.texts) > 1 else "")
        write(f"{head}{text}\n")
        for token, log_prob in () if out.log_probs is None else _tokens_of(out, row):
            record = {"token": token, "text": tokenizer.decode([token]), "log_prob": log_prob}
            write(json.dumps(record, ensure_ascii=False) + "\n")


def _tokens_of(out: st.Generation, row: int) -> Iterator[tuple[int, float]]:
    """The new tokens of a row, and their log-probabilities."""
    assert out.log_probs is not None
    length = out.lengths[row]
    parts = out.tokens[row, :length].tolist(), out.log_probs[row, :length].tolist()
    return zip(*parts, strict=True)


def _write_steps(
    write: Callable[[str], None], head: str, tokenizer: Any, steps: Iterator[list[list[int]]]
) -> tuple[str, int, int]:
    """Writes tokens as they come. Returns the speed, and the numbers of tokens and of calls."""
    write(head)
    output: list[int] = []
    shown, calls, began = "", 0, time.perf_counter()
    for (new,) in steps:
        output += new
        calls += 1
        if calls == 1:
            began = time.perf_counter()  # the first step includes compilation
            first = len(new)
        # A character may span several tokens: print only what later tokens cannot change.
        so_far = tokenizer.decode(output).rstrip("\N{REPLACEMENT CHARACTER}")
        write(so_far[len(shown) :])
        shown = so_far
    write(tokenizer.decode(output)[len(shown) :] + "\n")
    seconds = time.perf_counter() - began
    speed = f"{(len(output) - first) / seconds:,.0f} tokens/s, " if calls > 1 else ""
    return speed, len(output), calls
