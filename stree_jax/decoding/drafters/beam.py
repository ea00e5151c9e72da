"""Drafting by beam search: all beams of all steps are drafted.

STree, section 5.1 (Wu, Qin, Wong and Soatto, 2025, arXiv:2505.14969).
"""

import jax.numpy as jnp
import numpy as np

from stree_jax.decoding.drafters.levels import widths_of
from stree_jax.decoding.drafters.model import ModelDraftState
from stree_jax.decoding.drafters.search import Searches, search
from stree_jax.decoding.types import DraftTree, Step
from stree_jax.tree import TreeTopology, first_nodes


class BeamDrafter(Searches):
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
        model: any model with the target's vocabulary, or heads such as `MtpModel`.

    Raises:
        ValueError: `model` is not a model.
    """

    def default_topology(self) -> TreeTopology:
        """Three beams for four steps: the level sizes of the paper's tree A."""
        return TreeTopology.beam(3, 4)

    def widths(self, topology: TreeTopology) -> list[int]:
        """See `Searches`: the levels of the topology."""
        return widths_of(topology)

    def propose(
        self, state: ModelDraftState, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, ModelDraftState]:
        widths = self.widths(topology)
        found, _ = search(
            self.draft_model, state.reader, step, widths, lambda logits, depth: logits
        )
        nodes, num_read = np.arange(topology.num_nodes, dtype=np.int32), self.num_read(topology)
        place = jnp.broadcast_to(np.where(nodes < num_read, nodes, -1), found.tokens.shape)
        none = jnp.full(topology.num_nodes, -1, jnp.int32)
        return (
            DraftTree(found.tokens, found.tree, None, none, found.finite),
            ModelDraftState(
                self.draft_model.rest(found.reader), first_nodes(found.tree, num_read), place
            ),
        )
