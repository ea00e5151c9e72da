"""Grammars: what texts may be, as logits processors."""

from stree_jax.decoding.grammar.api import json_schema, regex
from stree_jax.decoding.grammar.automaton import Automaton

__all__ = ["Automaton", "json_schema", "regex"]
