"""A drafter for the drafter: a draft model that is itself sped up by speculative decoding.

    python examples/cascade.py

The medium model verifies the drafts of an inner drafter for several rounds in a row. The tokens
that it accepts and adds are the chain that the target verifies. Each of them is one that the medium
model would have drafted: its best token, its best token with the target's noise, or a sample. Only
the length of the chain is random. Whether a token exists depends on tests of the tokens before it,
so verifiers are as exact as for a chain of fixed length.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import stree_jax as st
from stree_jax.decoding import (
    KnownNodes,
    WholeModel,
    WholeModelState,
    all_finite,
    append_subtree,
    position_noise,
)
from stree_jax.decoding.drafters import check_child_sampling, drawn_by
from stree_jax.decoding.verifiers import default_verifier
from stree_jax.testing import assert_lossless


class Round(NamedTuple):
    """The proposal of the inner drafter in one round."""

    state: Any  # the inner drafter's, from its `propose`
    tokens: jax.Array  # [B, drafts]
    tree: st.Tree


class CascadeState(NamedTuple):
    """The state of a cascade between steps.

    The medium model reads the trees of all rounds. The tree of a round is a subtree of the last
    node that was accepted in the round before, and its root is the token that the medium model
    added there. The last added token is not read: if the target accepts it, it is a catch-up token.

    From round to round the inner drafter continues as if the target accepted everything. The state
    of the round in which the target's path ends is committed, so the states of all rounds are kept.
    One more round is drafted than verified, for paths that end in the last added token.
    """

    reader: WholeModelState  # of the medium model
    read: st.Tree  # the trees of all rounds
    place: jax.Array  # [B, N], index in them of each node of the chain
    rounds: tuple[Round, ...]  # the next step starts from the state of the first one


class CascadeDrafter(st.Drafter):
    """Drafts a chain by a medium model that has a drafter itself.

    In each round the inner drafter fills a tree, and the medium model verifies it in one call,
    accepts a path and adds a token. Chains have up to `rounds * (inner_topology.depth + 1)` drafts,
    fewer where the medium model accepts less.

    Args:
        medium: the draft model, with the target's vocabulary.
        inner: any drafter that needs no hidden states of its target: `NgramDrafter()` costs
            nothing, `ModelDrafter(small)` makes three levels of models.
        rounds: number of calls of the medium model in a step, all of them in one program.
        inner_topology: the tree of a round, with at least one draft; None: a chain of 2.
        child_sampling: "auto" drafts the medium model's best token, above temperature 0 with the
            noise that the target draws its tokens with. "iid" samples; then verifiers that test
            drafts by their probabilities are exact.
    """

    inner_layers = None

    def __init__(
        self,
        medium,
        inner,
        *,
        rounds=2,
        inner_topology=None,
        child_sampling="auto",
    ):
        if inner.inner_layers is not None:
            raise ValueError(
                f"inner is a {type(inner).__name__}, which drafts from its target's hidden states;"
                " a cascade has none, use a drafter with inner_layers = None"
            )
        check_child_sampling(child_sampling, ["iid"])
        self.medium = medium
        self.inner = inner
        self.rounds = rounds
        self.inner_topology = (inner_topology or st.TreeTopology.chain(2)).level_order()
        self.samples = child_sampling == "iid"

    def child_sampling(self, topology, *, temperature_is_zero):
        if not self.samples:
            return "top_k" if temperature_is_zero else "shared"
        if temperature_is_zero:
            raise ValueError("child_sampling = 'iid' needs temperature > 0")
        return "iid"

    def check(self, target, topology, *, temperature_is_zero):
        chain = self.default_topology()
        if topology != chain:
            raise ValueError(
                f"{self.rounds} rounds fill a chain of {chain.depth} drafts and no other tree;"
                " leave topology out"
            )
        self.inner.check(self.medium, self.inner_topology, temperature_is_zero=temperature_is_zero)
        self._inner_sampling(temperature_is_zero)  # raises if it refuses

    def default_topology(self):
        """Returns a chain as long as all rounds can accept."""
        return st.TreeTopology.chain(self.rounds * (self.inner_topology.depth + 1))

    def init(self, batch, topology, max_length):
        inner_topology, num_nodes = self.inner_topology, self.rounds * self.inner_topology.num_nodes

        def no_round():
            nodes = jnp.zeros((batch, inner_topology.num_nodes), jnp.int32)
            # The inner drafter drafts beyond the end of a row before the target's path is cut.
            state = self.inner.init(batch, inner_topology, max_length + topology.depth)
            return Round(state, nodes, inner_topology.tree(jnp.zeros(nodes.shape, bool)))

        return CascadeState(
            reader=self._reads.init(batch, num_nodes, max_length),
            read=st.TreeTopology.chain(num_nodes - 1).tree(jnp.zeros((batch, num_nodes), bool)),
            place=jnp.zeros((batch, topology.num_nodes), jnp.int32),
            rounds=tuple(no_round() for _ in range(self.rounds + 1)),
        )

    def read(self, state, tokens, hidden, lengths):
        """See `Drafter`. The inner drafter reads too."""
        first = state.rounds[0]
        first = first._replace(state=self.inner.read(first.state, tokens, None, lengths))
        reader = self._reads.read(state.reader, tokens, None, lengths)
        return state._replace(reader=reader, rounds=(first, *state.rounds[1:]))

    def propose(self, state, step, topology):
        is_zero = step.sampling.temperature_is_zero
        drawn = drawn_by(self, topology, temperature_is_zero=is_zero)
        inner_drawn = drawn if drawn.kind == "shared" else self._inner_sampling(is_zero)
        inner_topology = self.inner_topology
        name = default_verifier(inner_drawn, inner_topology, temperature_is_zero=is_zero)
        verifier = st.VERIFIERS[name]
        context, num_nodes = step.context, inner_topology.num_nodes
        batch = len(context.length)
        rows = jnp.arange(batch)[:, None]
        emitted = jnp.zeros(batch, jnp.int32)  # drafts in this step
        place = jnp.zeros((batch, topology.num_nodes), jnp.int32)
        finite = jnp.ones(batch, bool)
        text, inner_state = context, state.rounds[0].state
        reader, tree, last = state.reader, None, None
        rounds, log_probs, processors = [], [], step.processors
        for index in range(self.rounds + 1):
            first = index * num_nodes  # node of the round in the medium model's tree
            round_keys = jax.vmap(jax.random.fold_in, (0, None))(step.keys, index)
            keys = jax.vmap(lambda key: jax.random.split(key, 3))(round_keys)
            noise = self._noise_of_round(step, keys[:, 0], emitted, topology)
            inner_step = st.Step(text, keys[:, 1], noise, step.sampling, processors)
            draft, inner_state = self.inner.propose(inner_state, inner_step, inner_topology)
            finite &= draft.finite
            rounds.append(Round(inner_state, draft.tokens, draft.tree))
            if index == self.rounds:
                break

            tree = draft.tree if tree is None else append_subtree(tree, last, draft.tree)
            with jax.named_scope("verify"):  # by the medium model
                nodes = KnownNodes(first, num_nodes)
                logits, reader = self._reads.run(reader, draft.tokens, tree, nodes)
                finite &= (all_finite(logits) | ~draft.tree.valid).all(axis=-1)
                processor_states = processors.of_tree(draft.tokens, draft.tree, inner_topology)
                logits = processors.masked(logits, processor_states)
                if self.samples:
                    log_probs.append(st.token_log_probs(logits, step.sampling))
                inner_step = inner_step._replace(keys=keys[:, 2])
                verdict = verifier.verify(draft, logits, inner_step, inner_topology)

            # The accepted path and the added token, which is the next round's root.
            depths = jnp.arange(1, inner_topology.depth + 2, dtype=jnp.int32)[None]
            path = draft.tree.at_depth(draft.tree.on_path(verdict.last), depths)
            is_added = depths > verdict.num_accepted[:, None]
            accepted = jnp.take_along_axis(draft.tokens, path, axis=1)
            new_tokens = jnp.where(is_added, verdict.next_token[:, None], accepted)
            place = place.at[rows, emitted[:, None] + depths].set(
                jnp.where(is_added, first + num_nodes, first + path).astype(jnp.int32)
            )
            after = text.length[:, None] + depths - 1
            tokens = text.tokens.at[rows, after].set(new_tokens, mode="drop")
            count = verdict.num_accepted + 1
            committed = processors.commit(processor_states, verdict.last, new_tokens, count)
            processors = processors._replace(states=committed)
            text = st.Context(tokens, text.length + count)
            emitted += count
            last = first + verdict.last
            hidden = self._no_hidden(batch)
            inner_state = self.inner.commit(inner_state, draft, verdict, hidden, inner_topology)

        chain_nodes = jnp.arange(topology.num_nodes, dtype=jnp.int32)
        chain_log_probs = None
        if self.samples:  # at the node after which each token was drawn
            known = jnp.concatenate(log_probs, axis=1)
            before = jnp.minimum(place[:, :-1], known.shape[1] - 1)
            chain_log_probs = jnp.take_along_axis(known, before[..., None], axis=1)
        positions = context.length[:, None] - 1 + chain_nodes[None]
        has_row = (chain_nodes < topology.depth) & self.samples
        draft = st.DraftTree(
            tokens=jnp.take_along_axis(text.tokens, positions, axis=1),
            tree=topology.tree(chain_nodes[None] <= emitted[:, None]),
            log_probs=chain_log_probs,
            log_prob_row=jnp.where(has_row, chain_nodes, -1),
            finite=finite,
            drawn=drawn,
        )
        return draft, state._replace(reader=reader, read=tree, place=place, rounds=tuple(rounds))

    def commit(self, state, draft, verdict, hidden, topology):
        num_nodes, ended = self.inner_topology.num_nodes, verdict.last < 0
        last = jnp.maximum(verdict.last, 0)
        node = jnp.take_along_axis(state.place, last[:, None], axis=1)[:, 0]
        index, node_of_round = node // num_nodes, node % num_nodes

        def of_round(*leaves):
            """The leaf of the round in which the path ends, in each row."""
            shape = -1, *[1] * (leaves[0].ndim - 1)
            is_round = [(index == number).reshape(shape) for number in range(len(leaves))]
            return jnp.select(is_round, leaves, leaves[0])

        inner_state, tokens, tree = jax.tree.map(of_round, *state.rounds)
        no_rows = jnp.full(num_nodes, -1, jnp.int32)
        inner_draft = st.DraftTree(tokens, tree, None, no_rows, draft.finite)
        depth = jnp.take_along_axis(tree.depth, node_of_round[:, None], axis=1)[:, 0]
        end = jnp.where(ended, -1, node_of_round)
        inner_state = self.inner.commit(
            inner_state,
            inner_draft,
            st.Verdict(end, depth, verdict.next_token),
            self._no_hidden(len(last)),
            self.inner_topology,
        )
        place = jnp.where(state.place < self.rounds * num_nodes, state.place, -1)
        first = state.rounds[0]._replace(state=inner_state)
        return state._replace(
            reader=self._reads.commit(state.reader, state.read, place, draft, verdict),
            rounds=(first, *state.rounds[1:]),
        )

    @property
    def _reads(self):
        """The medium model as a draft model."""
        return WholeModel(self.medium)

    def _inner_sampling(self, temperature_is_zero):
        return drawn_by(self.inner, self.inner_topology, temperature_is_zero=temperature_is_zero)

    def _noise_of_round(self, step, keys, emitted, topology):
        """The noise at the positions after `emitted` drafts."""
        depth = self.inner_topology.depth
        if self.samples:  # the drafts that the target tests must not depend on its noise
            start = jnp.zeros_like(emitted)
            return position_noise(keys, start, depth, self.medium.vocab_size)
        if step.noise is None:
            return None
        positions = emitted[:, None] + jnp.arange(depth + 1, dtype=jnp.int32)[None]
        positions = jnp.minimum(positions, topology.depth)
        return jnp.take_along_axis(step.noise, positions[..., None], axis=1)

    def _no_hidden(self, batch):
        shape = batch, self.inner_topology.num_nodes, self.medium.config.d_model
        return jnp.zeros(shape, self.medium.dtype)


def main() -> None:
    """Decodes with the draft model, then with prompt lookup for it; a difference is an error."""
    target, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    encode = st.load_tokenizer(st.demo_path("target")).encode
    prompts = [encode("x = 1\nx = 2\nx = 3\n").ids, encode("Once upon a time").ids]
    drafters = {
        "the draft model, chain of 6": (st.ModelDrafter(draft), st.TreeTopology.chain(6)),
        "with prompt lookup, 2 rounds": (CascadeDrafter(draft, st.NgramDrafter()), None),
    }
    for name, (drafter, topology) in drafters.items():
        for out in assert_lossless(target, drafter, topology=topology, prompts=prompts):
            print(f"{name}: {out.stats.tau:.2f} tokens per target call, same text: True")


if __name__ == "__main__":
    main()
