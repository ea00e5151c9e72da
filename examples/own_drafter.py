"""A drafter of your own: a table of what followed each pair of tokens, kept in its state."""

import jax
import jax.numpy as jnp
from jax import lax

import stree_jax as st
from stree_jax.testing import assert_lossless


class PairTable(st.Drafter):
    """Drafts a chain: the token that last followed the last two, again and again."""

    inner_layers = None  # it needs no hidden states of the target
    size = 1 << 12  # entries of the table; pairs with the same hash share one

    def default_topology(self):
        return st.TreeTopology.chain(4)

    def check(self, target, topology, *, temperature_is_zero):
        if topology.width > 1:
            raise ValueError(f"drafts chains, this tree is {topology.width} nodes wide")

    def init(self, batch, topology, max_length):  # empty tables, and the next token to learn
        return jnp.full((batch, self.size), -1, jnp.int32), jnp.zeros(batch, jnp.int32)

    def read(self, state, tokens, hidden, lengths):
        return state  # `propose` learns from the whole text

    def propose(self, state, step, topology):
        def row(table, first, tokens, length):
            def entry(before, token):
                return (before * 31337 + token) % self.size

            def learn(at, table):
                return table.at[entry(tokens[at - 2], tokens[at - 1])].set(tokens[at])

            table = lax.fori_loop(jnp.maximum(first, 2), length, learn, table)
            chain = [tokens[jnp.maximum(length - 2, 0)], tokens[length - 1]]
            for _ in range(topology.depth):
                chain.append(table[entry(chain[-2], chain[-1])])
            drafts = jnp.stack(chain[1:])  # the root, then the drafts; none after a -1
            return (table, length), jnp.maximum(drafts, 0), jnp.cumprod(drafts >= 0) > 0

        state, tokens, valid = jax.vmap(row)(*state, *step.context)
        return st.DraftTree.of(tokens, topology.tree(valid)), state

    def commit(self, state, draft, verdict, hidden, topology):
        return state  # the next `propose` learns the accepted tokens


def main() -> None:
    """Decodes repetitive text with and without the drafter; a difference is an error."""
    model = st.from_pretrained(st.demo_path("target"))
    prompts = [st.load_tokenizer(st.demo_path("target")).encode("x = 1\nx = 2\nx = 3\n").ids]
    (out,) = assert_lossless(model, PairTable(), prompts=prompts, temperatures=(0.0,))
    print(f"{out.stats.tau:.2f} tokens per target call, same text: True")


if __name__ == "__main__":
    main()
