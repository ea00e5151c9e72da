"""Grammars from regular expressions and JSON schemas."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stree_jax.checks import check_int, require
from stree_jax.decoding import as_tokenizer, token_bytes
from stree_jax.extensions.grammar.automaton import Automaton
from stree_jax.extensions.grammar.byte_automaton import ByteAutomaton, automaton_of_graph
from stree_jax.extensions.grammar.expressions import parse
from stree_jax.extensions.grammar.graph import Graph, TooLarge
from stree_jax.extensions.grammar.json_text import automaton_of_schema, too_large
from stree_jax.extensions.grammar.token_tree import TokenTree
from stree_jax.messages import shown

# Names of special tokens that end texts.
_END_TOKENS = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eos|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<end_of_turn>",
    "<|endofturn|>",
    "<|end_of_role|>",
}


def regex(
    pattern: str, tokenizer: Any, *, eos_token: int | Sequence[int] | None = None
) -> Automaton:
    r"""Returns a `Rule` by which new tokens match a regular expression.

    They match it as a whole. The syntax is that of ECMA-262 with the flag `u`, without look-around,
    references, word boundaries, `\p` and anchors inside. End tokens are allowed where the pattern
    matches, so a row ends or continues there.

    Args:
        pattern: the regular expression.
        tokenizer: the model's, from `load_tokenizer`, or a fast tokenizer of transformers.
        eos_token: ids of the tokens that end a row, as in `Options`. None: the special tokens that
            have a common name of end tokens.

    Raises:
        ValueError: a bad pattern, one that no tokens spell or that needs too many states, an
            unknown kind of tokenizer, or no end token.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"pattern must be a regular expression, a text, got {shown(pattern)}")
    try:
        of_bytes = automaton_of_pattern(pattern)
        return _over_tokens(of_bytes, f"pattern {shown(pattern)}", tokenizer, eos_token)
    except TooLarge as error:
        raise ValueError(f"pattern {shown(pattern)} cannot be used: {error}; repeat less") from None


def json_schema(
    schema: Mapping[str, Any] | str | Any,
    tokenizer: Any,
    *,
    eos_token: int | Sequence[int] | None = None,
) -> Automaton:
    """Returns a `Rule` by which new tokens are JSON that a schema validates.

    Schemas are of a part of draft 2020-12; keywords outside it, such as `not` or `uniqueItems`, are
    refused. All texts are valid, but not all valid texts are possible: properties come in the
    schema's order, with at most one space between parts; where some are described, others come only
    if `additionalProperties` is there; recursion ends at depth 3, as do values of which nothing is
    said.

    Args:
        schema: a dictionary, a JSON text, or a class with the method `model_json_schema`, as
            pydantic's have.
        tokenizer, eos_token: as in `regex`.

    Raises:
        ValueError: a malformed schema, a keyword that is not read, or too many states, with the
            part of the schema; the others as in `regex`.
    """
    of_bytes, part = automaton_of_schema(schema)
    try:
        return _over_tokens(of_bytes, "schema", tokenizer, eos_token)
    except TooLarge as error:
        raise ValueError(too_large(part, error)) from None


def automaton_of_pattern(pattern: str) -> ByteAutomaton:
    """Makes the automaton over bytes of the texts of a pattern."""
    graph = Graph()
    try:
        automaton = automaton_of_graph(graph, graph.expression(0, parse(pattern)))
    except RecursionError:
        raise ValueError(f"pattern {shown(pattern)} is nested too deep") from None
    if automaton is None:
        raise ValueError(f"no text matches the pattern {shown(pattern)}")
    return automaton


def _over_tokens(
    of_bytes: ByteAutomaton, what: str, tokenizer: Any, eos_token: int | Sequence[int] | None
) -> Automaton:
    inner = as_tokenizer(tokenizer)
    tree = _tree(inner, inner.get_vocab_size(), end_tokens(tokenizer, eos_token))
    automaton = tree.automaton(of_bytes)
    if automaton is None:
        raise ValueError(f"no text of this tokenizer's tokens matches the {what}")
    return automaton


@functools.lru_cache(maxsize=4)
def _tree(tokenizer: Tokenizer, size: int, ends: tuple[int, ...]) -> TokenTree:
    """Returns a tokenizer's tree, cached until it gets more tokens."""
    texts = token_bytes(tokenizer)
    for token in ends:
        check_int("eos_token", token, 0, len(texts) - 1)
    return TokenTree(texts, ends)


def end_tokens(tokenizer: Any, eos_token: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns a grammar's end tokens; arguments and errors as in `regex`."""
    if eos_token is None:
        eos_token = getattr(tokenizer, "eos_token_id", None)
    if eos_token is None:
        added = as_tokenizer(tokenizer).get_added_tokens_decoder()
        ends = [token for token, entry in added.items() if entry.content in _END_TOKENS]
        if not ends:
            raise ValueError(
                "no special token of this tokenizer has the name of an end token; pass"
                " eos_token=..., the id of the token that ends a text"
            )
        return tuple(ends)
    tokens = eos_token if isinstance(eos_token, list | tuple) else np.ravel(eos_token).tolist()
    require(bool(tokens), "eos_token is empty; a grammar needs a token that ends the text")
    return tuple(check_int("eos_token", token, 0) for token in tokens)
