"""A filter of your own: eta sampling, with a few tokens banned.

    python examples/own_filter.py

Eta sampling (Hewitt, Manning and Liang, 2022) leaves out tokens whose probability is below
`min(epsilon, sqrt(epsilon) * exp(-entropy))`: few tokens where the model is sure, many elsewhere.
Draft and target go through the same filter, so drafts stay good, and the text is that of
autoregressive decoding with the filter.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

import stree_jax as st
from stree_jax.testing import assert_lossless


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eta(st.Rule):
    """Eta sampling.

    Attributes:
        epsilon: a number of each row: an array `[B]` in the decode loop.
        banned: tokens that are left out unless they are the best; static.
    """

    epsilon: float
    banned: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def apply(self, logits: Array, state: None, /) -> Array:
        """See `stree_jax.Rule`."""
        if self.banned:
            is_banned = jnp.zeros(logits.shape[-1], bool).at[jnp.array(self.banned)].set(True)
            logits = jnp.where(is_banned & (logits < 0), -jnp.inf, logits)  # the best one is 0
        log_p = jax.nn.log_softmax(logits)
        p = jnp.exp(log_p)
        minus_entropy = jnp.where(p > 0, p * log_p, 0.0).sum(axis=-1, keepdims=True)
        epsilon = jnp.reshape(self.epsilon, (-1,) + (1,) * (logits.ndim - 1))
        eta = jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(minus_entropy))
        return jnp.where((p >= eta) | (logits == 0), logits, -jnp.inf)


def main() -> None:
    """Decodes with a tree and without drafts; differences are errors."""
    model = st.from_pretrained(st.demo_path("target"))
    drafter = st.ModelDrafter(st.load_draft(st.demo_path("draft"), model))
    prompts = [st.load_tokenizer(st.demo_path("target")).encode("The old house stood").ids]
    options = dict(topology=st.TreeTopology.paper("A"), prompts=prompts, temperatures=(0.9,))
    for filters in ((Eta(0.02),), (Eta(0.02, banned=(3, 4)), st.TopK(20))):
        (out,) = assert_lossless(model, drafter, filters=filters, **options)
        print(f"{out.stats.tau:.2f} tokens per target call, same text: True")


if __name__ == "__main__":
    main()
