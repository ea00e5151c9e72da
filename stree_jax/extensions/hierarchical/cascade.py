"""Drafting with a draft model that is itself sped up by speculative decoding.

The medium model verifies the drafts of an inner drafter for several rounds in a row. The tokens
that it accepts and adds are the chain that the target verifies. Each of them is one that the medium
model would have drafted: its best token, its best token with the target's noise, or a sample. Only
the length of the chain is random. Whether a token exists depends on tests of the tokens before it,
so verifiers are as exact as for a chain of fixed length.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stree_jax import (
    VERIFIERS,
    Context,
    Drafter,
    DraftTree,
    Drawn,
    HybridLM,
    Step,
    Tree,
    TreeTopology,
    Verdict,
    token_log_probs,
)
from stree_jax.array_types import Array, Float, Int
from stree_jax.checks import check_int
from stree_jax.decoding import (
    KnownNodes,
    Reader,
    WholeModel,
    all_finite,
    append_subtree,
    position_noise,
)
from stree_jax.decoding.drafters import check_child_sampling, drawn_by
from stree_jax.decoding.verifiers import default_verifier
from stree_jax.messages import shown
from stree_jax.models import check_model

MAX_DEPTH = 64  # each round is part of the program


class Round(NamedTuple):
    """The proposal of the inner drafter in one round."""

    state: Any  # the inner drafter's, from its `propose`
    tokens: Int[Array, "B drafts"]
    tree: Tree


class CascadeState(NamedTuple):
    """The state of a cascade between steps.

    The medium model reads the trees of all rounds. The tree of a round is a subtree of the last
    node that was accepted in the round before, and its root is the token that the medium model
    added there. The last added token is not read: if the target accepts it, it is a catch-up token.

    From round to round the inner drafter continues as if the target accepted everything. Its states
    of all rounds are kept, and that of the round in which the target's path ends is committed. One
    more round is drafted than verified, for paths that end in the last added token.
    """

    reader: Reader  # of the medium model
    read: Tree  # the trees of all rounds
    place: Int[Array, "B N"]  # index in them of each node of the chain
    rounds: tuple[Round, ...]  # the next step starts from the state of the first one


class CascadeDrafter(Drafter):
    """Drafts a chain by a medium model that has a drafter itself.

    In each round the inner drafter fills a tree, and the medium model verifies it in one call,
    accepts a path and adds a token. Chains have up to `rounds * (inner_topology.depth + 1)` drafts,
    fewer where the medium model accepts less.

    The inner drafter's state is kept `rounds + 1` times. Its `commit` gets zeros as hidden states.

    Args:
        medium: the draft model, with the target's vocabulary.
        inner: any drafter that `generate` takes with the medium model as target: `NgramDrafter()`
            costs nothing, `ModelDrafter(small)` makes three levels.
        rounds: number of calls of the medium model in a step.
        inner_topology: the tree of a round; None: a chain of 2.
        child_sampling: "auto" drafts the medium model's best token at temperature 0, and above it
            its best one with the noise that the target draws its tokens with. "iid" samples; then
            verifiers that test drafts by their probabilities are exact.

    Raises:
        ValueError: a number out of range, something that is not a model, an inner drafter that is
            not a module or needs its target's states, or an inner tree without drafts.
    """

    inner_layers = None

    def __init__(
        self,
        medium: HybridLM,
        inner: Drafter,
        *,
        rounds: int = 2,
        inner_topology: TreeTopology | None = None,
        child_sampling: str = "auto",
    ):
        check_model(medium)
        if not isinstance(inner, Drafter):
            raise ValueError(
                "inner must be a drafter such as NgramDrafter() or ModelDrafter(small); got"
                f" {shown(inner)}"
            )
        if inner.inner_layers is not None:
            raise ValueError(
                f"inner is a {type(inner).__name__}, which drafts from its target's hidden states;"
                " a cascade has none of them, use a drafter with inner_layers = None, such as"
                " NgramDrafter()"
            )
        if inner_topology is None:
            inner_topology = TreeTopology.chain(2)
        if not isinstance(inner_topology, TreeTopology) or inner_topology.num_nodes == 1:
            raise ValueError(
                "inner_topology must be a TreeTopology with at least one draft, got"
                f" {shown(inner_topology)}"
            )
        most = MAX_DEPTH // (inner_topology.depth + 1)
        check_child_sampling(child_sampling, ["iid"])
        self.medium = medium
        self.inner = inner
        self.rounds = check_int(
            f"rounds, for chains of at most {MAX_DEPTH} drafts,", rounds, 1, most
        )
        self.inner_topology = inner_topology.level_order()
        self._child_sampling = child_sampling

    @property
    def _reads(self) -> WholeModel:
        """The medium model as a draft model."""
        return WholeModel(self.medium)

    def check(self, target: HybridLM, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        """See `Drafter`; refuses what the inner drafter refuses."""
        own = self.default_topology()
        if topology.parents != own.parents:
            raise ValueError(
                f"a cascade of {self.rounds} rounds fills a chain of {own.depth} drafts and no"
                f" other tree; leave topology out, or use TreeTopology.chain({own.depth})"
            )
        self.inner.check(self.medium, self.inner_topology, temperature_is_zero=temperature_is_zero)
        self._inner_sampling(temperature_is_zero)  # raises if it refuses

    def default_topology(self) -> TreeTopology:
        """Returns a chain as long as all rounds can accept."""
        return TreeTopology.chain(self.rounds * (self.inner_topology.depth + 1))

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> CascadeState:
        inner, num_nodes = self.inner_topology, self.rounds * self.inner_topology.num_nodes

        def no_round() -> Round:
            nodes = jnp.zeros((batch, inner.num_nodes), jnp.int32)
            # The inner drafter drafts beyond the end of a row before the target's path is cut.
            state = self.inner.init(batch, inner, max_length + topology.depth)
            return Round(state, nodes, inner.tree(jnp.zeros(nodes.shape, bool)))

        return CascadeState(
            reader=self._reads.init(batch, num_nodes, max_length),
            read=TreeTopology.chain(num_nodes - 1).tree(jnp.zeros((batch, num_nodes), bool)),
            place=jnp.zeros((batch, topology.num_nodes), jnp.int32),
            rounds=tuple(no_round() for _ in range(self.rounds + 1)),
        )

    def read(self, state: CascadeState, tokens: Array, hidden: Any, lengths: Array) -> CascadeState:
        """See `Drafter`. The inner drafter reads too."""
        first = state.rounds[0]
        first = first._replace(state=self.inner.read(first.state, tokens, None, lengths))
        reader = self._reads.read(state.reader, tokens, None, lengths)
        return state._replace(reader=reader, rounds=(first, *state.rounds[1:]))

    def propose(
        self, state: CascadeState, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, CascadeState]:
        is_zero = step.sampling.temperature_is_zero
        drawn = self.child_sampling(topology, temperature_is_zero=is_zero)
        how, context, noise = drawn.kind, step.context, step.noise
        law = drawn if how == "shared" else self._inner_sampling(is_zero)  # of the inner drafts
        rule = default_verifier(law, self.inner_topology, temperature_is_zero=is_zero)
        verifier = VERIFIERS[rule]
        inner, vocab_size = self.inner_topology, self.medium.vocab_size
        batch, num_nodes = context.tokens.shape[0], inner.num_nodes
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        emitted = jnp.zeros(batch, jnp.int32)  # drafts in this step
        place = jnp.zeros((batch, topology.num_nodes), jnp.int32)
        finite = jnp.ones(batch, bool)
        text, inner_state = context, state.rounds[0].state
        reader, tree, at = state.reader, None, jnp.zeros(batch, jnp.int32)
        rounds, log_probs, rules = [], [], step.processors
        for index in range(self.rounds + 1):
            first = index * num_nodes  # node of the round in the medium model's tree
            of_round = jax.vmap(jax.random.fold_in, (0, None))(step.keys, index)
            split = jax.vmap(lambda key: jax.random.split(key, 3))(of_round)
            if how == "iid":  # the drafts that the target tests must not depend on its noise
                own_noise = position_noise(
                    split[:, 0], jnp.zeros_like(emitted), inner.depth, vocab_size
                )
            elif noise is not None:
                positions = emitted[:, None] + jnp.arange(inner.depth + 1, dtype=jnp.int32)[None]
                positions = jnp.minimum(positions, topology.depth)
                own_noise = jnp.take_along_axis(noise, positions[..., None], axis=1)
            else:
                own_noise = None
            own = Step(text, split[:, 1], own_noise, step.sampling, rules)
            draft, inner_state = self.inner.propose(inner_state, own, inner)
            finite &= draft.finite
            rounds.append(Round(inner_state, draft.tokens, draft.tree))
            if index == self.rounds:
                break

            tree = draft.tree if tree is None else append_subtree(tree, at, draft.tree)
            with jax.named_scope("verify"):  # by the medium model
                own_nodes = KnownNodes(first, num_nodes)
                logits, reader = self._reads.run(reader, draft.tokens, tree, own_nodes)
                finite &= (all_finite(logits) | ~draft.tree.valid).all(axis=-1)
                states = rules.of_tree(draft.tokens, draft.tree, inner)
                logits = rules.masked(logits, states)
                if how == "iid":
                    log_probs.append(token_log_probs(logits, step.sampling))
                verdict = verifier.verify(draft, logits, own._replace(keys=split[:, 2]), inner)

            # The accepted path and the added token, which is the next round's root.
            steps = jnp.arange(1, inner.depth + 2, dtype=jnp.int32)[None]
            node = draft.tree.at_depth(draft.tree.on_path(verdict.last), steps)
            is_added = steps > verdict.num_accepted[:, None]
            new = jnp.where(
                is_added,
                verdict.next_token[:, None],
                jnp.take_along_axis(draft.tokens, node, axis=1),
            )
            where = emitted[:, None] + steps
            place = place.at[rows, where].set(
                jnp.where(is_added, first + num_nodes, first + node).astype(jnp.int32)
            )
            tokens = text.tokens.at[rows, text.length[:, None] + steps - 1].set(new, mode="drop")
            count = verdict.num_accepted + 1
            rules = rules._replace(states=rules.commit(states, verdict.last, new, count))
            text = Context(tokens, text.length + count)
            emitted += count
            at = first + verdict.last
            inner_state = self.inner.commit(
                inner_state, draft, verdict, self._no_hidden(batch, num_nodes), inner
            )

        assert tree is not None  # there is at least one round
        nodes = jnp.arange(topology.num_nodes, dtype=jnp.int32)
        valid = nodes[None] <= emitted[:, None]
        rows_of = None
        if log_probs:  # at the node after which each token was drawn
            known = jnp.concatenate(log_probs, axis=1)
            before = jnp.minimum(place[:, :-1], known.shape[1] - 1)
            rows_of = jnp.take_along_axis(known, before[..., None], axis=1)
        places = context.length[:, None] - 1 + nodes[None]
        draft = DraftTree(
            tokens=jnp.take_along_axis(text.tokens, places, axis=1),
            tree=topology.tree(valid),
            log_probs=rows_of,
            log_prob_row=jnp.where((nodes < topology.depth) & (how == "iid"), nodes, -1),
            finite=finite,
            drawn=drawn,
        )
        return draft, state._replace(reader=reader, read=tree, place=place, rounds=tuple(rounds))

    def commit(
        self,
        state: CascadeState,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N M"],
        topology: TreeTopology,
    ) -> CascadeState:
        ended = verdict.last < 0
        last = jnp.maximum(verdict.last, 0)

        num_nodes = self.inner_topology.num_nodes
        node = jnp.take_along_axis(state.place, last[:, None], axis=1)[:, 0]
        index, within = node // num_nodes, node % num_nodes

        def of_round(*leaves: Array) -> Array:
            is_it = [
                (index == i).reshape(-1, *[1] * (leaves[0].ndim - 1)) for i in range(len(leaves))
            ]
            return jnp.select(is_it, leaves, leaves[0])

        state_of, tokens, tree = jax.tree.map(of_round, *state.rounds)
        inner_draft = DraftTree(
            tokens, tree, None, jnp.full(num_nodes, -1, jnp.int32), draft.finite
        )
        depth = jnp.take_along_axis(tree.depth, within[:, None], axis=1)[:, 0]
        inner_verdict = Verdict(jnp.where(ended, -1, within), depth, verdict.next_token)
        place = jnp.where(state.place < self.rounds * num_nodes, state.place, -1)
        nothing, inner = self._no_hidden(len(last), num_nodes), self.inner_topology
        new = self.inner.commit(state_of, inner_draft, inner_verdict, nothing, inner)
        first = state.rounds[0]._replace(state=new)
        return state._replace(
            reader=self._reads.commit(state.reader, state.read, place, draft, verdict),
            rounds=(first, *state.rounds[1:]),
        )

    def _inner_sampling(self, temperature_is_zero: bool) -> Drawn:
        return drawn_by(self.inner, self.inner_topology, temperature_is_zero=temperature_is_zero)

    def _no_hidden(self, batch: int, num_tokens: int) -> Array:
        shape = (batch, num_tokens, self.medium.config.d_model)
        return jnp.zeros(shape, self.medium.dtype)
