"""A logits processor of your own: no run of n tokens comes twice.

    python examples/own_processor.py

The state is the output so far. On a tree each node has one, that of its path.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

import stree_jax as st
from stree_jax.testing import assert_lossless


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoRepeats(st.Rule):
    """Rules out tokens that would complete a run of `size` tokens of the output again."""

    size: int = dataclasses.field(metadata={"static": True})
    room: int = dataclasses.field(metadata={"static": True})  # most new tokens

    def init(self, context: st.Context, vocab_size: int) -> Array:
        """The output of each row, oldest first, after places without a token (-1)."""
        return jnp.full((len(context.length), self.room), -1)

    def advance(self, state: Array, tokens: Array) -> Array:
        """Moves the output up, and appends a token: `[B, Q, room]`."""
        return jnp.concatenate([state[..., 1:], tokens[..., None]], axis=-1)

    def apply(self, logits: Array, state: Array, /) -> Array:
        """Compares the last `size - 1` tokens with all that came before."""
        starts, before = self.room - self.size + 1, self.size - 1
        runs = jnp.stack([state[..., i : i + starts] for i in range(before)], axis=-1)
        same = (runs == state[..., None, self.room - before :]).all(-1) & (runs >= 0).all(-1)
        ruled_out = jnp.where(same, state[..., before:], logits.shape[-1])
        batch, queries = ruled_out.shape[:2]
        at = jnp.arange(batch)[:, None, None], jnp.arange(queries)[:, None], ruled_out
        return logits.at[at].set(-jnp.inf, mode="drop")


def main() -> None:
    """Decodes with a tree and without drafts; differences are errors."""
    model = st.from_pretrained(st.demo_path("target"))
    drafter = st.ModelDrafter(st.load_draft(st.demo_path("draft"), model))
    prompts = [st.load_tokenizer(st.demo_path("target")).encode("The old house stood").ids]
    options = dict(topology=st.TreeTopology.paper("A"), prompts=prompts, max_new_tokens=40)
    for out in assert_lossless(model, drafter, processors=[NoRepeats(2, 40)], **options):
        pairs = [*zip(out.tokens[0], out.tokens[0][1:], strict=False)]
        assert len({*pairs}) == len(pairs)
        print(f"{out.stats.tau:.2f} tokens per target call, no pair twice: True")


if __name__ == "__main__":
    main()
