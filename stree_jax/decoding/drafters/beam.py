"""Drafting by beam search: all beams of all steps are drafted.

STree, section 5.1 (Wu, Qin, Wong and Soatto, 2025, arXiv:2505.14969).
"""

import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Float, Int
from stree_jax.decoding.drafters.levels import widths_of
from stree_jax.decoding.drafters.model import ModelDraftState, RunsModel
from stree_jax.decoding.drafters.search import after_search, close_search, open_search, search
from stree_jax.decoding.reader import open_reader, resumed_reader
from stree_jax.decoding.types import Context, DraftTree, Step, Verdict
from stree_jax.tree import TreeTopology, first_nodes


class BeamDrafter(RunsModel):
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

    chooses_shape = True  # see `Drafter`

    def default_topology(self) -> TreeTopology:
        """Three beams for four steps: the level sizes of the paper's tree A."""
        return TreeTopology.beam(3, 4)

    def prepare(self, context: Context, topology: TreeTopology, max_length: int) -> ModelDraftState:
        """See `Drafter`."""
        num_read = sum(widths_of(topology)[:-1])
        reader = open_reader(self.model, context, num_read, max_length)
        return open_search(reader, len(context.length), topology, num_read)

    def resume(
        self,
        state: ModelDraftState,
        context: Context,
        read: Int[Array, " B"],
        topology: TreeTopology,
        max_length: int,
    ) -> ModelDraftState:
        """See `Drafter`."""
        num_read = sum(widths_of(topology)[:-1])
        reader = resumed_reader(self.model, state.reader, context, read, num_read, max_length)
        return open_search(reader, len(context.length), topology, num_read)

    def propose(
        self, state: ModelDraftState, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, ModelDraftState]:
        """See `Drafter`."""
        widths = widths_of(topology)
        found, _ = search(self.model, state.reader, step, widths, lambda logits, depth: logits)
        nodes, num_read = np.arange(topology.num_nodes, dtype=np.int32), sum(widths[:-1])
        place = jnp.broadcast_to(np.where(nodes < num_read, nodes, -1), found.tokens.shape)
        none = jnp.full(topology.num_nodes, -1, jnp.int32)
        return (
            DraftTree(found.tokens, found.tree, None, none, found.finite),
            after_search(found.reader, first_nodes(found.tree, num_read), place),
        )

    def commit(
        self,
        state: ModelDraftState,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N M"],
        topology: TreeTopology,
    ) -> ModelDraftState:
        """See `Drafter`."""
        return close_search(self.model, state, draft, verdict, hidden)
