"""A drafter of your own: a suffix automaton over the text so far. Tokens only, no draft model.

    python examples/own_drafter.py

The suffix automaton of a text recognises all of its substrings, and is built online in linear time
(Blumer et al., 1985). The suffix link of its last state is the longest suffix of the text that
occurred before, however long; the tokens that followed that earlier occurrence are the draft, as in
SAM decoding (Hu et al., 2024, arXiv:2411.10666). `NgramDrafter` looks at three tokens at most.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

import stree_jax as st
from stree_jax.testing import assert_lossless


class Automaton(NamedTuple):
    """Of one row. The edges of a state are a linked list; -1 ends a list and stands for "none"."""

    length: Array  # [states] of the longest substring that ends in the state
    link: Array  # [states] suffix link
    end: Array  # [states] where in the text the first occurrence ends
    first_edge: Array  # [states]
    edge_token: Array  # [edges]
    edge_target: Array  # [edges]
    next_edge: Array  # [edges]
    num_states: Array  # []
    num_edges: Array  # []
    last: Array  # [] the state of the whole text
    num_read: Array  # [] tokens of the text

    @classmethod
    def empty(cls, max_length: int) -> "Automaton":
        """Of the empty text. n tokens need at most 2 n states and 3 n edges."""
        states = jnp.full(2 * max_length, -1, jnp.int32)
        edges = jnp.full(3 * max_length, -1, jnp.int32)
        zero = jnp.int32(0)
        return cls(
            states.at[0].set(0), states, states, states, edges, edges, edges,
            num_states=zero + 1, num_edges=zero, last=zero, num_read=zero,
        )  # fmt: skip

    def edge(self, state: Array, token: Array) -> Array:
        """The edge of a state with this token, or -1."""
        return lax.while_loop(
            lambda edge: (edge >= 0) & (self.edge_token[edge] != token),
            lambda edge: self.next_edge[edge],
            self.first_edge[state],
        )

    def with_edge(self, state: Array, token: Array, target: Array) -> "Automaton":
        """One more edge."""
        new = self.num_edges
        return self._replace(
            edge_token=self.edge_token.at[new].set(token),
            edge_target=self.edge_target.at[new].set(target),
            next_edge=self.next_edge.at[new].set(self.first_edge[state]),
            first_edge=self.first_edge.at[state].set(new),
            num_edges=new + 1,
        )

    def with_state(self, length: Array, link: Array, end: Array) -> "Automaton":
        """One more state, without edges."""
        new = self.num_states
        return self._replace(
            length=self.length.at[new].set(length),
            link=self.link.at[new].set(link),
            end=self.end.at[new].set(end),
            num_states=new + 1,
        )

    def extended(self, token: Array) -> "Automaton":
        """Of the text with one more token."""
        new = self.num_states
        grown = self.with_state(self.length[self.last] + 1, jnp.int32(0), self.num_read)

        def lacks_edge(carry: tuple) -> Array:
            automaton, state = carry
            return (state >= 0) & (automaton.edge(state, token) < 0)

        def add_edge(carry: tuple) -> tuple:
            automaton, state = carry
            return automaton.with_edge(state, token, new), automaton.link[state]

        grown, state = lax.while_loop(lacks_edge, add_edge, (grown, self.last))
        linked = lax.cond(state < 0, lambda a: a, lambda a: a.linked(new, state, token), grown)
        return linked._replace(last=new, num_read=self.num_read + 1)

    def linked(self, new: Array, state: Array, token: Array) -> "Automaton":
        """With the suffix link of the state `new`; `state` has an edge with the token."""
        target = self.edge_target[self.edge(state, token)]

        def to_target(a: Automaton) -> Automaton:
            return a._replace(link=a.link.at[new].set(target))

        def to_clone(a: Automaton) -> Automaton:
            # The target also stands for longer substrings: split off those that `state` ends.
            clone = a.num_states
            a = a.with_state(a.length[state] + 1, a.link[target], a.end[target])
            a, _ = lax.while_loop(
                lambda carry: carry[1] >= 0,
                lambda carry: (
                    carry[0].with_edge(
                        clone, carry[0].edge_token[carry[1]], carry[0].edge_target[carry[1]]
                    ),
                    carry[0].next_edge[carry[1]],
                ),
                (a, a.first_edge[target]),
            )

            def leads_to_target(carry: tuple) -> Array:
                a, above = carry
                return (above >= 0) & (a.edge_target[a.edge(above, token)] == target)

            def redirect(carry: tuple) -> tuple:
                a, above = carry
                edges = a.edge_target.at[a.edge(above, token)].set(clone)
                return a._replace(edge_target=edges), a.link[above]

            a, _ = lax.while_loop(leads_to_target, redirect, (a, state))
            return a._replace(link=a.link.at[target].set(clone).at[new].set(clone))

        is_exact = self.length[target] == self.length[state] + 1
        return lax.cond(is_exact, to_target, to_clone, self)


class SuffixAutomatonDrafter(nnx.Module):
    """Drafts what followed the longest suffix of the text that occurred before.

    Args:
        min_match: shortest suffix that counts, in tokens.
    """

    def __init__(self, min_match: int = 2):
        self.min_match = min_match

    def default_topology(self) -> st.TreeTopology:
        """See `stree_jax.Drafter`."""
        return st.TreeTopology.chain(6)

    def child_sampling(self, topology: st.TreeTopology, *, temperature_is_zero: bool) -> str:
        """See `stree_jax.Drafter`. Lookups use no random numbers, so the target is followed."""
        if topology.width > 1:
            raise ValueError(
                f"a suffix automaton drafts chains, this tree is {topology.width} nodes wide;"
                " use TreeTopology.chain"
            )
        return "top_k"

    def prepare(self, context: st.Context, topology: st.TreeTopology, max_length: int) -> Automaton:
        """See `stree_jax.Drafter`. The first `propose` reads the prompt."""
        batch = len(context.length)
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), Automaton.empty(max_length)
        )

    def propose(
        self,
        state: Automaton,
        context: st.Context,
        keys: Array,
        sampling: st.Sampling,
        topology: st.TreeTopology,
        noise: Array | None = None,
    ) -> tuple[st.DraftTree, Automaton]:
        """See `stree_jax.Drafter`."""

        def row(arguments: tuple) -> tuple[Array, Array, Automaton]:
            automaton, tokens, length = arguments
            automaton = lax.while_loop(
                lambda a: a.num_read < length, lambda a: a.extended(tokens[a.num_read]), automaton
            )
            seen_before = automaton.link[automaton.last]
            is_match = automaton.length[seen_before] >= self.min_match
            place = automaton.end[seen_before] + jnp.arange(topology.num_nodes)
            drafts = tokens[jnp.minimum(place, length - 1)]
            is_root = jnp.arange(topology.num_nodes) == 0
            valid = is_root | (is_match & (place < length))
            return jnp.where(is_root, tokens[length - 1], drafts), valid, automaton

        # Rows one after the other: their loops have different lengths.
        tokens, valid, state = lax.map(row, (state, context.tokens, context.length))
        draft = st.DraftTree(
            tokens=tokens,
            tree=topology.tree(valid),
            log_probs=None,
            log_prob_row=jnp.full(topology.num_nodes, -1, jnp.int32),
            finite=jnp.ones(len(tokens), bool),
        )
        return draft, state

    def commit(
        self,
        state: Automaton,
        draft: st.DraftTree,
        verdict: st.Verdict,
        topology: st.TreeTopology,
        hidden: Array,
    ) -> Automaton:
        """See `stree_jax.Drafter`. The next `propose` reads the accepted tokens."""
        return state


def main() -> None:
    """Decodes repetitive text with and without the drafter; a difference is an error."""
    model = st.from_pretrained(st.demo_path("target"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    text = "Question: Ann has 3 pens and buys 4 pens. How many pens does Ann have?\nAnswer:"
    prompts = [tokenizer.encode(text).ids]
    for name, drafter in (("n-gram", st.NgramDrafter()), ("automaton", SuffixAutomatonDrafter())):
        (out,) = assert_lossless(
            model, drafter, prompts=prompts, max_new_tokens=160, temperatures=(0.0,)
        )
        print(f"{name}: {out.stats.tau:.2f} tokens per target call, same text: True")


if __name__ == "__main__":
    main()
