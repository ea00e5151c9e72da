"""Typical acceptance, which is LOSSY: its output does not have the target's distribution.

Medusa (Cai et al., 2024, arXiv:2401.10774, section 2.3.1). It is included for comparison.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from stree_jax.array_types import Array
from stree_jax.decoding.sampling import sample_tokens, token_log_probs
from stree_jax.decoding.types import DraftTree, Drawn, Step, Verdict
from stree_jax.decoding.verifiers.base import Verifier
from stree_jax.decoding.verifiers.follow import deepest
from stree_jax.tree import TreeTopology


@dataclasses.dataclass(frozen=True)
class Typical(Verifier):
    """LOSSY. Accepts a draft t if p(t) exceeds the threshold `min(epsilon, delta * exp(-H(p)))`.

    p is the target's distribution at the parent after temperature, top-k and top-p, and H its
    entropy in nats. The path ends at the deepest node whose ancestors are all accepted, the first
    one in order among equals. The token after it is sampled from p.
    """

    name: str = "typical"
    epsilon: float = 0.09
    delta: float = 0.3
    lossless: ClassVar[bool] = False

    def check(self, drawn: Drawn, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        """Accepts any drafts, since the rule is exact for none; refuses temperature 0."""
        if temperature_is_zero:
            raise ValueError(f"verifier {self.name!r} needs temperature > 0; use 'greedy' at 0")

    def verify(
        self, draft: DraftTree, logits: Array, step: Step, topology: TreeTopology
    ) -> Verdict:
        tree = draft.tree
        log_p = token_log_probs(logits, step.sampling)
        p = jnp.exp(log_p)
        entropy = -jnp.where(p > 0, p * log_p, 0.0).sum(axis=-1)
        bound = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))  # [B, N]
        parents = jnp.maximum(tree.parents, 0)
        above = jnp.take_along_axis(p, parents[..., None], axis=1)
        prob = jnp.take_along_axis(above, draft.tokens[..., None], axis=2)[..., 0]
        accepted = prob > jnp.take_along_axis(bound, parents, axis=1)
        assert step.noise is not None  # `check` refuses temperature 0
        return deepest(tree, accepted, sample_tokens(logits, step.noise, tree.depth, step.sampling))
