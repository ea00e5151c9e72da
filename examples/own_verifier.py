"""A verifier of your own: a limit on the drafts accepted per step, around any built-in rule.

    python examples/own_verifier.py

A streaming server may want short bursts: every step emits at most `most + 1` tokens of a row. The
wrapper cuts the path that the inner rule accepted, and the first draft that it cuts off becomes the
step's last token. That stays exact for any exact rule: what is emitted is a prefix of what the rule
would emit, the cut depends on its length alone, and the target continues from there.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

import stree_jax as st
from stree_jax.testing import assert_lossless


@dataclasses.dataclass(frozen=True)  # hashable: compiled programs depend on it
class ShortSteps:
    """Cuts what another verifier accepts.

    Attributes:
        inner: a rule that is exact.
        most: drafts that a step may accept.
    """

    inner: st.Verifier
    most: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.inner.name}, at most {self.most}"

    def check(
        self, child_sampling: str, topology: st.TreeTopology, *, temperature_is_zero: bool
    ) -> None:
        """See `stree_jax.Verifier`. What the inner rule refuses is refused."""
        if self.most < 0:
            raise ValueError(f"most must not be negative, got {self.most}")
        self.inner.check(child_sampling, topology, temperature_is_zero=temperature_is_zero)

    def verify(
        self,
        keys: Array,
        draft: st.DraftTree,
        logits: Array,
        sampling: st.Sampling,
        noise: Array | None,
        *,
        topology: st.TreeTopology,
    ) -> st.Verdict:
        """See `stree_jax.Verifier`."""
        verdict = self.inner.verify(keys, draft, logits, sampling, noise, topology=topology)
        row = jnp.arange(len(verdict.last))
        on_path = draft.tree.ancestor_mask[row, verdict.last]  # [B, N]

        def node_at(depth: int) -> Array:
            return jnp.argmax(on_path & (draft.tree.depth == depth), axis=1).astype(jnp.int32)

        is_cut = verdict.num_accepted > self.most
        cut_off = draft.tokens[row, node_at(self.most + 1)]
        return st.Verdict(
            last=jnp.where(is_cut, node_at(self.most), verdict.last),
            num_accepted=jnp.minimum(verdict.num_accepted, self.most),
            next_token=jnp.where(is_cut, cut_off, verdict.next_token),
        )


def main() -> None:
    """Decodes with and without the cut, at temperature 0 and above; differences are errors."""
    model = st.from_pretrained(st.demo_path("target"))
    drafter = st.ModelDrafter(st.from_pretrained(st.demo_path("draft")))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    prompts = [tokenizer.encode("Question: Tom has 5 apples and buys 7 more.").ids]
    for name, temperature in (("greedy", 0.0), ("target_only", 0.8)):
        for verifier in (st.VERIFIERS[name], ShortSteps(st.VERIFIERS[name], most=1)):
            (out,) = assert_lossless(
                *(model, drafter),
                verifier=verifier,
                temperatures=(temperature,),
                prompts=prompts,
                max_new_tokens=48,
            )
            print(f"{verifier.name}: {out.stats.tau:.2f} tokens per target call, same text: True")


if __name__ == "__main__":
    main()
