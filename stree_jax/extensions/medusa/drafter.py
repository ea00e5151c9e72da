"""Drafting with Medusa heads: no draft model, one matrix product for all depths of the tree.

Medusa (Cai et al., 2024, arXiv:2401.10774). Head d gets the target's hidden state at the last
accepted node only: all nodes of a depth have the same candidates, and a tree is a product of ranks.
The acceptance rule of the paper ("typical") is not exact; the verifiers of all other drafters are
exact for these drafts.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from stree_jax import Drafter, DraftTree, Drawn, HybridLM, Step, TreeTopology, Verdict
from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding import with_last
from stree_jax.decoding.drafters import check_child_sampling, drawn_children, root_token
from stree_jax.extensions.medusa.head import MedusaHeads
from stree_jax.heads import check_fits
from stree_jax.models import check_on_one_device, output_logits


class MedusaState(NamedTuple):
    """The input of the heads."""

    hidden: Float[Array, "B M"]  # the target's, at the last accepted node
    known: Bool[Array, " B"]  # False for a text of one token, which starts without drafts


class MedusaDrafter(Drafter):
    """Fills a static tree by Medusa heads and the target's output head.

    The target's hidden states of the prompt come through `read`, so the first step drafts; only
    after a prompt of a single token there is none yet.

    Args:
        target: the model that `generate` decodes with.
        heads: Medusa heads of that model.
        child_sampling: see `ModelDrafter`. Sampled children are drawn once per depth, and all
            nodes of a depth share them. "multi_step" and "without_replacement" are
            exact with that; "traversal" is for chains only.

    Raises:
        ValueError: another value of `child_sampling`, or heads of other sizes.
    """

    def __init__(self, target: HybridLM, heads: MedusaHeads, *, child_sampling: str = "auto"):
        check_child_sampling(child_sampling)
        check_on_one_device(target, "MedusaDrafter")
        width = heads.bias.shape[1], target.config.d_model
        check_fits("Medusa heads", "load them with load_medusa(path, target)", width=width)
        self.heads = heads
        self.output_head = target.output_head
        self.vocab_size = target.config.vocab_size
        self.multiplier = target.config.logits_multiplier
        self.implementation = target.implementation
        self._child_sampling = child_sampling

    def check(self, target: HybridLM, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        shape = self.output_head.shape, target.output_head.shape
        way_out = "make MedusaDrafter with the target that generate gets"
        check_fits("the model of the Medusa heads", way_out, output_head=shape)
        if topology.depth > self.heads.num_heads:
            raise ValueError(
                f"a tree of depth {topology.depth} needs as many Medusa heads, and there are"
                f" {self.heads.num_heads}"
            )

    def default_topology(self) -> TreeTopology:
        """Returns that of a `ModelDrafter`, as deep as there are heads."""
        tree = TreeTopology.default()
        nodes = zip(tree.parents, tree.depths, strict=True)
        return TreeTopology(tuple(at for at, depth in nodes if depth <= self.heads.num_heads))

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> Drawn:
        how = super().child_sampling(topology, temperature_is_zero=temperature_is_zero)
        inner = [topology.depths[n] for n, below in enumerate(topology.children) if below]
        shares = len({*inner}) < len(inner)  # two nodes of one depth have children
        return Drawn(how.kind, by_depth=shares)

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> MedusaState:
        shape = (batch, self.heads.bias.shape[1])
        return MedusaState(jnp.zeros(shape, self.output_head.storage.dtype), jnp.zeros(batch, bool))

    def propose(
        self, state: MedusaState, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, MedusaState]:
        is_zero = step.sampling.temperature_is_zero
        how = self.child_sampling(topology, temperature_is_zero=is_zero)
        depth = topology.depth
        scores = self.logits(self.heads(state.hidden[:, None])[:, 0, :depth])  # [B, D, V]
        width = max(map(len, topology.children))
        drawn, exists, log_probs = drawn_children(
            how.kind, scores, width, step, np.arange(depth), step.keys
        )

        # Below the root a node's token is the one of its depth and of its rank among its siblings.
        parents = topology.parents[1:]
        rank = np.array([topology.children[p].index(n) for n, p in enumerate(parents, 1)])
        level = np.array(topology.depths[1:]) - 1
        root = root_token(step.context)
        tokens = jnp.concatenate([root, drawn[:, level, rank]], axis=1)
        drafted = exists[:, level, rank] & state.known[:, None]
        drafted = jnp.concatenate([jnp.ones_like(root, bool), drafted], axis=1)
        valid = ~jnp.any(topology.ancestor_mask[None] & ~drafted[:, None], axis=-1)
        is_inner = np.array([bool(children) for children in topology.children])
        row = np.where(is_inner & (log_probs is not None), topology.depths, -1)
        draft = DraftTree(
            tokens=tokens,
            tree=topology.tree(valid),
            log_probs=log_probs,
            log_prob_row=jnp.asarray(row, jnp.int32),
            finite=exists[..., 0].all(axis=-1) | ~state.known,
            drawn=how,
        )
        return draft, state

    def commit(
        self,
        state: MedusaState,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N M"],
        topology: TreeTopology,
    ) -> MedusaState:
        return with_last(state, hidden, verdict.last)

    def read(self, state: MedusaState, tokens: Array, hidden: Array, lengths: Array) -> MedusaState:
        return with_last(state, hidden, lengths - 1)

    def outputs_ahead(
        self, tokens: Int[Array, "B T"], hidden: Float[Array, "B T M"], depth: int
    ) -> list[Float[Array, "B T M"]]:
        """See `HeadModel`: of all heads."""
        ahead = self.heads(hidden)
        return [ahead[:, :, head] for head in range(self.heads.num_heads)]

    def logits(self, outputs: Float[Array, "B T M"]) -> Float32[Array, "B T V"]:
        """Logits over the target's vocabulary, by the target's output head."""
        logits = output_logits(outputs, self.output_head, self.multiplier, self.implementation)
        return logits[..., : self.vocab_size]
