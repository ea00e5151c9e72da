"""Texts of rows with different logits processors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax as st
from tests.decoding.texts import ROWS, decoded, model_of, planned

SIZE = 37  # tokens of the tiny models


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk(st.LogitsProcessor):
    """A token is allowed where the table `[states, V]` has a state after it."""

    table: jax.Array = dataclasses.field(metadata={"shared": True})
    start: int = 0

    def init(self, context, vocab_size):
        return jnp.broadcast_to(self.start, context.length.shape).astype(jnp.int32)

    def advance(self, state, tokens):
        return jnp.where(state < 0, -1, self.table[jnp.maximum(state, 0), tokens])

    def __call__(self, logits, state, /):
        allowed = (self.table[jnp.maximum(state, 0)] >= 0) & (state >= 0)[..., None]
        return jnp.where(allowed, logits, -jnp.inf)


def random_walk(states=5, size=SIZE, share=0.4, seed=0):
    """A table in which every state allows about this share of the tokens, and at least two."""
    rng = np.random.default_rng(seed)
    table = rng.integers(states, size=(states, size))
    table[rng.random(table.shape) > share] = -1
    table[:, :2] = np.abs(table[:, :2])
    return Walk(jnp.asarray(table, jnp.int32))


WALK = random_walk()
GRAMMAR = st.Automaton(np.asarray(WALK.table))  # the same in compressed tables
_MILD = dict(repetition=1.05, presence=0.05, frequency=0.02, bias={36: -0.1}, banned=[36], start=0)
_STRONG = (
    dict(repetition=3.0),
    dict(repetition=0.5, presence=-0.3),
    dict(presence=1.5),
    dict(frequency=0.8),
    dict(bias={3: 2.0, 4: -np.inf, 9: 1.0}),
    dict(banned=[0, 2, 3, 5, 8, 13, 21, 34]),
    dict(start=2),
)


def rules_of(index):
    """Of processors of every kind a row has a strong one; some have none, half have ends."""
    free = index % 8 == 7
    of = _MILD | ({} if free else _STRONG[index % 8])
    every = (
        st.RepetitionPenalty(of["repetition"]),
        st.PresencePenalty(of["presence"]),
        st.FrequencyPenalty(of["frequency"]),
        st.LogitBias(of["bias"]),
        st.BannedTokens(of["banned"]),
        dataclasses.replace(GRAMMAR, start=of["start"]),
    )
    return dict(
        processors=() if free else every,
        min_new_tokens=0 if free else 3 * (index % 5),
        eos_token=[int(index) % 37, 5] if index % 2 else (),
    )


def ruled(model, rows=None, **options):
    """A request of all or some of `ROWS` with the processors and end tokens of `rules_of`."""
    rows = range(len(ROWS)) if rows is None else rows
    rules = [rules_of(row) for row in rows]
    return planned(model, [ROWS[row] for row in rows], rules, **options)


@functools.cache
def autoregressive(family="plain"):
    """The texts of `ROWS` with the rules of `rules_of`."""
    model = model_of(family)
    return decoded(model, ruled(model))
