"""`stree-jax generate`: streams text from any checkpoint."""

import time
from pathlib import Path

import jax
from rich.console import Console
from rich.style import Style

import stree_jax as st
from stree_jax.checkpoint import first_line
from stree_jax.cli.cache import enable_cache
from stree_jax.cli.trees import parse_tree
from stree_jax.convert import find
from stree_jax.decoding.verifiers import LOSSY_VERIFIERS


def run_generate(
    console: Console,
    *,
    checkpoint: str,
    prompt: str,
    draft: str | None,
    ngram: bool,
    medusa: Path | None,
    tree: str | None,
    verifier: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    dtype: str,
    tokenizer_path: Path | None,
    max_length: int | None,
    lossy: bool,
) -> None:
    """Loads the models, decodes, and prints tokens as they are accepted.

    Raises:
        ValueError: an argument is invalid.
        FloatingPointError: logits are not finite.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "--prompt is not UTF-8; convert it, or check the terminal's locale"
        ) from None
    if not 0 <= seed < 2**32:  # jax would take it modulo 2**32, or raise OverflowError
        raise ValueError(f"--seed must be from 0 to {2**32 - 1}, got {seed!s:.80}")
    if (draft is not None) + ngram + (medusa is not None) > 1:
        raise ValueError("--draft, --ngram and --medusa each select a drafter; choose one")
    topology = None if tree is None else parse_tree(tree)
    if tree is not None and topology is None:  # a tuned result that says not to draft
        draft, ngram, medusa = None, False, None
    tokenizer = st.load_tokenizer(tokenizer_path or find(checkpoint))
    enable_cache()
    model = st.from_pretrained(checkpoint, dtype=dtype)
    drafter: st.Drafter | None = None
    if draft is not None:
        beam = tree is not None and tree.startswith("beam:")
        kind = st.BeamDrafter if beam else st.ModelDrafter
        drafter = kind(st.from_pretrained(draft, dtype=dtype))
    elif ngram:
        drafter = st.NgramDrafter()
    elif medusa is not None:
        drafter = st.MedusaDrafter(model, st.load_medusa(medusa, model))

    try:
        tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"the tokenizer of {tokenizer_path or checkpoint} cannot encode --prompt:"
            f" {first_line(error)}"
        ) from error
    if not prompt:
        raise ValueError("--prompt is empty; give at least one character")
    if not tokens:
        raise ValueError(
            f"the tokenizer of {tokenizer_path or checkpoint} makes no tokens of --prompt"
        )
    steps = st.stream(
        model,
        [tokens],
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        topology=topology,
        verifier=verifier,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_length=max_length,
        key=jax.random.key(seed),
        lossy=lossy,
    )

    def write(text: str) -> None:
        # Bypasses rich, which wraps lines, expands tabs and replaces emoji codes.
        console.file.write(text)
        console.file.flush()

    write(Style(dim=True).render(prompt) if console.is_terminal else prompt)
    output: list[int] = []
    shown, calls, began = "", 0, time.perf_counter()
    for (new,) in steps:
        output += new
        calls += 1
        if calls == 1:
            began = time.perf_counter()  # the first step includes compilation
            first = len(new)
        # A character may span several tokens: print only what later tokens cannot change.
        text = tokenizer.decode(output).rstrip("\N{REPLACEMENT CHARACTER}")
        write(text[len(shown) :])
        shown = text
    write(tokenizer.decode(output)[len(shown) :] + "\n")
    seconds = time.perf_counter() - began
    speed = f"{(len(output) - first) / seconds:,.0f} tokens/s, " if calls > 1 else ""
    label = (
        f", LOSSY ({verifier}): not the target's own text" if verifier in LOSSY_VERIFIERS else ""
    )
    console.print(
        f"{len(output)} tokens, {calls} target calls, {speed}tau {len(output) / calls:.2f}{label}",
        style="dim",
    )
