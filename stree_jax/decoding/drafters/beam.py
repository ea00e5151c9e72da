"""Drafting by beam search: all beams of all steps are drafted.

STree, section 5.1 (Wu, Qin, Wong and Soatto, 2025, arXiv:2505.14969).
"""

import jax.numpy as jnp

from stree_jax.array_types import Array, Int
from stree_jax.decoding.drafters.dynamic import DynamicDrafter
from stree_jax.decoding.drafters.levels import widths_of
from stree_jax.decoding.drafters.search import Found
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, TreeTopology


class BeamDrafter(DynamicDrafter):
    """A draft model that grows a tree by beam search, from one state.

    A level of the tree is one step of the search: the most probable *paths* among all continuations
    of the level above, best first. Tokens stay in the tree when their beam is dropped later, so w
    beams and n steps are 1 + w n nodes. The topology, such as `TreeTopology.beam(w, n)`, gives the
    number of nodes of each level; how they connect is data.

    The search is deterministic and uses the model's probabilities at temperature 1, whatever the
    request's temperature, so only verifiers that follow the target accept it: "greedy" and
    "target_only".
    Among equally probable paths the earlier beam comes first, then the lower token id.

    Args:
        model: any model with the target's vocabulary.

    Raises:
        ValueError: `model` is not a model.
    """

    runs_on_mesh = True

    def __init__(self, model: HybridLM):
        super().__init__(model, sharpness=1.0)
        self._child_sampling = "top_k"

    def default_topology(self) -> TreeTopology:
        """Three beams for four steps: the level sizes of the paper's tree A."""
        return TreeTopology.beam(3, 4)

    def widths(self, topology: TreeTopology) -> list[int]:
        """Beams of each level, the root's first."""
        return widths_of(topology)

    def _choose(
        self, found: Found, topology: TreeTopology
    ) -> tuple[Int[Array, "B N"], Tree, Int[Array, "B N"]]:
        nodes = jnp.arange(topology.num_nodes, dtype=jnp.int32)
        place = jnp.where(nodes < self._num_read(topology), nodes, -1)
        return found.tokens, found.tree, jnp.broadcast_to(place, found.tokens.shape)
