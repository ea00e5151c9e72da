"""`stree-jax generate`: streams text from any checkpoint."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
from rich.console import Console
from rich.style import Style

import stree_jax as st
from stree_jax.checks import check_int
from stree_jax.cli.drafters import Chosen, ignored_fields, load_drafter
from stree_jax.cli.mesh import join_processes, parse_mesh
from stree_jax.cli.options import Wanted
from stree_jax.cli.trees import parse_tree
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.convert import find
from stree_jax.decoding.verifiers import LOSSY_VERIFIERS
from stree_jax.text import Texts


class Loaded(NamedTuple):
    """Models and tokenizer of a command."""

    model: st.HybridLM
    drafter: st.Drafter | None
    topology: st.TreeTopology | None
    texts: Texts
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
    texts = Texts.at(tokenizer_path or find(checkpoint))
    ignore, of_drafter = ignored_fields(drafter.ignore, checkpoint, drafter.path)
    drafter = drafter._replace(ignore=of_drafter)
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
        texts,
        output,
    )


def check_seed(seed: object, name: str) -> None:
    """Refuses seeds that jax takes modulo 2**32 or raises OverflowError for."""
    check_int(name, seed, 0, 2**32 - 1)


def under(grammar: tuple[str, Any], loaded: Loaded, ends: Sequence[int]) -> st.Automaton:
    """The logits processor of a grammar, see `Wanted.grammar`, whose texts these tokens end.

    Raises:
        ValueError: a bad grammar.
    """
    name, argument = grammar
    make = {"regex": st.regex, "json_schema": st.json_schema}[name]
    return make(argument, loaded.texts.tokenizer(""), eos_token=ends or None)


def run_generate(
    console: Console,
    loaded: Loaded,
    asked: Wanted,
    *,
    prompt: str,
    seed: int,
    max_length: int | None,
    verifier: str | None,
    lossy: bool,
) -> None:
    """Decodes, and prints text as its tokens are accepted.

    Texts with log-probabilities, and several of a prompt, are printed when they are complete.

    Raises:
        ValueError: an argument is invalid.
        FloatingPointError: logits are not finite.
    """
    texts, drafts = loaded.texts, dict[str, Any](drafter=loaded.drafter, topology=loaded.topology)
    drafts |= {"verifier": verifier, "lossy": lossy}
    tokens = texts.tokens(prompt, special=asked.bos, name="--prompt")
    ends = texts.end_tokens(loaded.model.config, asked.eos_token)
    grammar = [] if asked.grammar is None else [under(asked.grammar, loaded, ends)]
    options: dict[str, Any] = {
        **asked.options,
        "eos_token": ends or None,
        "processors": grammar,
        "tokenizer": texts.tokenizer(prompt),
        "key": jax.random.key(seed),
        "max_length": max_length,
    }

    def write(text: str) -> None:
        # Bypasses rich, which wraps lines, expands tabs and replaces emoji codes.
        console.file.write(text)
        console.file.flush()

    head = Style(dim=True).render(prompt) if console.is_terminal else prompt
    if asked.options["log_probs"] or asked.num_texts > 1:
        out = st.generate(loaded.model, [tokens], n=asked.num_texts, **drafts, **options)
        _write_all(write, head, loaded, out)
        speed, num_tokens, calls = "", out.stats.num_tokens, out.stats.num_target_calls
    else:
        steps = st.stream(loaded.model, [tokens], **drafts, **options)
        speed, num_tokens, calls = _write_steps(write, head, loaded, ends, steps)
    label = (
        f", LOSSY ({verifier}): not the target's own text"
        if verifier and verifier in LOSSY_VERIFIERS
        else ""
    )
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
    head: str,
    loaded: Loaded,
    ends: Sequence[int],
    steps: Iterator[list[st.Piece]],
) -> tuple[str, int, int]:
    """Writes text as it comes. Returns the speed, and the numbers of tokens and of calls."""
    write(head)
    num_tokens, calls, began = 0, 0, time.perf_counter()
    for (new,) in steps:
        num_tokens += len(new)
        calls += 1
        if calls == 1:
            began = time.perf_counter()  # the first step includes compilation
            first = len(new)
        reason = "end_token" if new and new[-1] in ends else ""
        write(loaded.texts.without_end(new.text or "", new, reason))
    write("\n")
    seconds = time.perf_counter() - began
    speed = f"{(num_tokens - first) / seconds:,.0f} tokens/s, " if calls > 1 else ""
    return speed, num_tokens, calls
