"""A verifier of your own: a limit on the drafts accepted per step, around any built-in rule.

The path is cut where the limit is, and the first draft cut off is the step's last token. What is
emitted is a prefix of what the inner rule emits, so that stays exact for any exact rule.
"""

import dataclasses

import jax.numpy as jnp

import stree_jax as st
from stree_jax.testing import assert_lossless


@dataclasses.dataclass(frozen=True)  # hashable: compiled programs depend on it
class ShortSteps(st.Verifier):
    """Cuts what another verifier accepts."""

    inner: st.Verifier
    most: int  # drafts that a step may accept
    name: str = "short steps"

    @property
    def follows_target(self):
        """True if its tokens are the target's own, as those of the inner rule are."""
        return self.inner.follows_target

    def check(self, drawn, topology, *, temperature_is_zero):
        """See `stree_jax.Verifier`. What the inner rule refuses is refused."""
        self.inner.check(drawn, topology, temperature_is_zero=temperature_is_zero)

    def verify(self, draft, logits, step, topology):
        """See `stree_jax.Verifier`."""
        verdict = self.inner.verify(draft, logits, step, topology)
        row = jnp.arange(len(verdict.last))
        on_path = draft.tree.ancestor_mask[row, verdict.last]  # [B, N]

        def node_at(depth):
            return jnp.argmax(on_path & (draft.tree.depth == depth), axis=1).astype(jnp.int32)

        is_cut = verdict.num_accepted > self.most
        return st.Verdict(
            last=jnp.where(is_cut, node_at(self.most), verdict.last),
            num_accepted=jnp.minimum(verdict.num_accepted, self.most),
            next_token=jnp.where(
                is_cut, draft.tokens[row, node_at(self.most + 1)], verdict.next_token
            ),
        )


def main() -> None:
    """Decodes with the cut, at temperature 0 and above; differences are errors."""
    target, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    prompt = st.load_tokenizer(st.demo_path("target")).encode("Question: Tom has 5 apples.").ids
    for name, temperature in (("greedy", 0.0), ("target_only", 0.8)):
        rule = ShortSteps(st.VERIFIERS[name], most=1)
        options = dict(verifier=rule, temperatures=(temperature,), prompts=[prompt])
        (out,) = assert_lossless(target, st.ModelDrafter(draft), **options)
        print(f"{name}: {out.stats.tau:.2f} tokens per target call, same text: True")


if __name__ == "__main__":
    main()
