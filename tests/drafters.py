"""Drafters and verifiers that tests write, as a user would."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import stree_jax as st
from stree_jax.tuning import RankTrace


def drafted(tokens, topology):
    """A draft of these tokens `[B, N]` in all nodes, without log-probabilities."""
    tree = topology.tree(jnp.ones(tokens.shape, bool))
    return st.DraftTree.of(tokens.astype(jnp.int32), tree)


class Echo(st.Drafter):
    """Drafts the last token again; its state is a number per row."""

    def default_topology(self):
        return st.TreeTopology.chain(1)

    def init(self, batch, topology, max_length):
        return {"seen": jnp.zeros(batch, jnp.int32)}

    def read(self, state, tokens, hidden, lengths):
        return state

    def propose(self, state, step, topology):
        root = st.root_only(step.context).tokens
        return drafted(jnp.broadcast_to(root, (len(root), topology.num_nodes)), topology), state

    def commit(self, state, draft, verdict, hidden, topology):
        return {"seen": state["seen"] + 1}


class Sharing(Echo):
    """Its state is arrays that are not its own, and one array twice."""

    def __init__(self, table):
        self.table = nnx.Param(table)

    def init(self, batch, topology, max_length):
        zeros = jnp.zeros(batch)
        return (zeros, zeros, self.table[...], 0)

    def commit(self, state, draft, verdict, hidden, topology):
        return state


class KnownText(Echo):
    """Drafts that know the text: in each step one path of the tree is right, in turn to every node.

    So all accepted lengths and all branches occur, and no draft model has to be compiled.
    """

    def __init__(self, prompts, texts, vocab_size):
        self.starts = jnp.array([len(prompt) for prompt in prompts])
        self.texts, self.vocab_size = jnp.asarray(texts), vocab_size

    def default_topology(self):
        return st.TreeTopology.chain(4)

    def init(self, batch, topology, max_length):
        return None

    def propose(self, state, step, topology):
        (rows, length), nodes = self.texts.shape, topology.num_nodes
        context, row = step.context, jnp.arange(rows)
        after = (context.length - self.starts)[:, None] + np.array(topology.depths) - 1
        right = jnp.take_along_axis(self.texts, jnp.clip(after, 0, length - 1), axis=1)
        end = (7 * context.length + row) % nodes
        is_right = jnp.asarray(topology.ancestor_mask)[end]
        tokens = jnp.where(is_right, right, (right + 1 + np.arange(nodes)) % self.vocab_size)
        tokens = tokens.at[:, 0].set(context.tokens[row, context.length - 1])
        return drafted(tokens, topology), None

    def commit(self, state, draft, verdict, hidden, topology):
        return None


class AnyTree(Echo):
    """Draws a tree of any shape in each step, most of whose tokens are those of a text."""

    chooses_shape = True

    def __init__(self, text, seed, vocab_size):
        self.text, self.seed, self.vocab_size = jnp.asarray(text), jnp.uint32(seed), vocab_size

    def propose(self, state, step, topology):
        length, nodes = step.context.length, topology.num_nodes
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.seed), length)
        draws = jax.vmap(lambda key: jax.random.uniform(key, (4, nodes)))(keys)
        above, is_right, exists, any_token = jnp.moveaxis(draws, 1, 0)
        rows, nothing = jnp.arange(len(length)), jnp.zeros(above.shape, jnp.int32)
        parents, depth, valid = nothing - 1, nothing, exists < 0.9
        mask = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (len(length), nodes, nodes))
        valid = valid.at[:, 0].set(True)
        for node in range(1, nodes):
            parent = (node * above[:, node]).astype(jnp.int32)
            parent = jnp.where(depth[rows, parent] < topology.depth, parent, 0)
            parents, depth, valid, mask = (
                parents.at[:, node].set(parent),
                depth.at[:, node].set(depth[rows, parent] + 1),
                valid.at[:, node].min(valid[rows, parent]),
                mask.at[:, node].max(mask[rows, parent]),
            )
        right = self.text.at[length[:, None] + depth - 1].get(mode="clip")
        wrong = (self.vocab_size * any_token).astype(jnp.int32)
        tokens = jnp.where(is_right < 0.8, right, wrong)
        tokens = tokens.at[:, :1].set(st.root_only(step.context).tokens)
        tree = st.Tree(parents, depth, mask & valid[:, None], valid)
        return st.DraftTree.of(tokens, tree), state

    def commit(self, state, draft, verdict, hidden, topology):
        return state


class Plain(st.Drafter):
    """What the base requires."""

    def __init__(self, model, others=None):
        self.inner = st.ModelDrafter(model)
        self.others = nnx.data(others)

    def default_topology(self):
        return st.TreeTopology.chain(2)

    def init(self, *arguments):
        return self.inner.init(*arguments)

    def read(self, state, tokens, hidden, lengths):
        assert hidden.shape[:2] == tokens.shape  # who does not say gets the target's states
        return self.inner.read(state, tokens, hidden, lengths)

    def propose(self, *arguments, **options):
        return self.inner.propose(*arguments, **options)

    def commit(self, *arguments):
        return self.inner.commit(*arguments)


class Answering(Plain):
    """The same with abilities."""

    inner_layers = None

    def __init__(self, model, limit=None):
        self.inner = st.ModelDrafter(model)
        self.limit = limit

    def read(self, state, tokens, hidden, lengths):
        assert hidden is None
        return self.inner.read(state, tokens, hidden, lengths)

    def models(self):
        return [self.inner.model]

    def check(self, target, topology, *, temperature_is_zero):
        if self.limit is not None and target.config.d_model > self.limit:
            raise ValueError(f"this drafter is for targets of a width up to {self.limit}")
        if topology.num_nodes > 5 or not temperature_is_zero:
            raise ValueError("this drafter is for small trees at temperature 0")

    def rank_trace(self, target, request, tokens, num_ranks):
        return RankTrace([np.zeros((len(new), 3), int) for new in tokens], num_ranks)


class Holding(Echo):
    """A drafter with a leaf that is no array."""

    def __init__(self):
        self.table = nnx.data({1: "one"})


@dataclasses.dataclass(frozen=True)
class Delegating(st.Verifier):
    """Wraps a built-in, as a user would to log or to change something."""

    inner: st.Verifier
    name: str = "delegating"

    @property
    def follows_target(self):
        return self.inner.follows_target

    def check(self, drawn, topology, *, temperature_is_zero):
        self.inner.check(drawn, topology, temperature_is_zero=temperature_is_zero)

    def verify(self, draft, logits, step, topology):
        return self.inner.verify(draft, logits, step, topology)


@dataclasses.dataclass(frozen=True)
class AcceptNothing(st.Verifier):
    """Greedy, without drafts."""

    name: str = "accept_nothing"
    follows_target = True

    def check(self, drawn, topology, *, temperature_is_zero):
        pass

    def verify(self, draft, logits, step, topology):
        tokens = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return st.Verdict(jnp.zeros_like(tokens), jnp.zeros_like(tokens), tokens)


class Nameless(st.Verifier):
    """A verifier."""

    check = verify = AcceptNothing.check


class Unhashable(Nameless):
    """A verifier."""

    name = "unhashable"
    __hash__ = None
