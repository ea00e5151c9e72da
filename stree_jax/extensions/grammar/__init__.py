"""Grammars: what texts may be, as logits processors."""

from stree_jax.extensions.grammar.api import json_schema, regex
from stree_jax.extensions.grammar.automaton import Automaton

__all__ = ["Automaton", "json_schema", "regex"]
