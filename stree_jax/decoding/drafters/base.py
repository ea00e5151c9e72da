"""The base of drafters: objects that propose trees of tokens for the target to verify."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax.array_types import Array, Float, Int
from stree_jax.decoding.drafters.children import chosen_child_sampling
from stree_jax.decoding.traced_checks import check_like
from stree_jax.decoding.types import Context, DraftTree, Drawn, Step, Verdict
from stree_jax.mesh.rows import placed_like
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology


class Drafter(nnx.Module):
    """Proposes draft trees inside the decode loop: the base of all drafters.

    A drafter is a pytree. Its array leaves are traced; its settings are part of the tree structure,
    so a program is compiled for each value of them.

    No method changes the drafter. Its memory is a *state*: a pytree of arrays with the batch axis
    first, or None. `init` makes it; `read`, `propose` and `commit` take it and return it with the
    same structure, shapes and dtypes. The loop donates it, so `init` must return fresh arrays: none
    twice, and none that the drafter holds.

    Order of calls:

        default_topology    in Python, before anything is compiled
        init                once, before the first token
        read                for every piece of text that the target prefills
        propose, commit     every step, traced

    Rows are independent: what a row drafts depends on its own tokens, state and key alone. A text
    is continued from its state: after any number of steps more of it may be read. Between runs,
    arrays whose sizes depend on `max_length` may be cut to other sizes or padded with zeros; so
    may, after a `read` with `lengths` of 0, those whose sizes depend on the topology.

    `docs/extending.md` explains each method, `examples/own_drafter.py` is one.

    Attributes:
        inner_layers: which hidden states of the target `read` and `commit` get. Numbers of layers,
            ascending: the states after the final norm, with the residual stream after each of these
            layers appended, `[B, N, (1 + inner) M]`. None: `read` gets None, and is not traced.
        chooses_shape: True if trees do not have the topology's shape; `tune`, which chooses a
            topology, refuses such a drafter.
        rank_trace: a method for `tune`, if candidates depend on the depth of a node, see
            `stree_jax.tuning.rank_trace`; None: they do not.
        outputs_ahead: the same in less for heads on the target's states, with a method `logits`,
            see `HeadModel`.
    """

    inner_layers: tuple[int, ...] | None = ()
    chooses_shape: bool = False
    rank_trace: Any = None
    outputs_ahead: Any = None
    _child_sampling: str = "top_k"  # or the option of this name of the library's drafters

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> Drawn | Any:
        """Returns how it chooses children, a `Drawn` or a kind of it, true of every draft.

        Rules decide by it whether they are exact. "top_k" is any choice without random numbers.
        """
        how = chosen_child_sampling(self._child_sampling, temperature_is_zero=temperature_is_zero)
        return Drawn(how)

    def check(self, target: HybridLM, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        """Refuses what it cannot serve, before anything is compiled.

        Raises:
            ValueError: the target, tree or temperature.
        """

    def models(self) -> list[HybridLM]:
        """Its draft models, of the target's vocabulary and mesh: all models found inside."""
        leaves = jax.tree.leaves(self, is_leaf=lambda part: isinstance(part, HybridLM))
        return [part for part in leaves if isinstance(part, HybridLM)]

    @abc.abstractmethod
    def default_topology(self) -> TreeTopology:
        """The draft tree if the user gives none."""

    @abc.abstractmethod
    def init(self, batch: int, topology: TreeTopology, max_length: int) -> Any:
        """The state of rows that have no text.

        Args:
            batch: number of rows.
            topology: the draft tree of every step, nodes in level order.
            max_length: most tokens of a row, prompt included.
        """

    @abc.abstractmethod
    def read(
        self, state: Any, tokens: Int[Array, "B T"], hidden: Any, lengths: Int[Array, " B"]
    ) -> Any:
        """The state after the next tokens of a text, which the target has just prefilled.

        The last token of a text is never read: it is the root of the first tree.

        Args:
            state: the state from `init`, `read` or `commit`.
            tokens: the tokens, then padding.
            hidden: the target's states after them, `[B, T, M]`, or None, see `inner_layers`.
            lengths: how many of the tokens each row reads; with 0 it keeps its text.
        """

    @abc.abstractmethod
    def propose(self, state: Any, step: Step, topology: TreeTopology) -> tuple[DraftTree, Any]:
        """Grows a tree below each row's last token.

        Args:
            state: the state from `init`, `read` or `commit`.
            step: the text so far, whose last token is the root, random keys, noise and sampling
                settings. Drafts that depend on `step.noise` are "shared".
            topology: sizes and, for a static tree, the shape: `topology.tree(valid)`. A tree of
                another shape needs `topology.num_nodes` nodes and at most `topology.depth` levels.
                With a choice of trees it may be smaller than the state has room for.

        Returns:
            The draft tree and the state. Nodes that a row lacks are not `valid`.
        """

    @abc.abstractmethod
    def commit(
        self,
        state: Any,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N M"],
        topology: TreeTopology,
    ) -> Any:
        """Advances the drafter along the accepted path.

        Args:
            state: the state from `propose`.
            draft: the tree that was verified.
            verdict: the accepted path, already cut at the end of sequence and at the token limit;
                `last` is -1 for rows that have ended, whose state must stay valid.
            hidden: the target's hidden states at all nodes after its final norm, in the target's
                dtype; unspecified at nodes that are not valid.
            topology: the topology given to `propose`.

        Returns:
            The state for the next `propose`.
        """


def drawn_by(
    drafter: Drafter | None, topology: TreeTopology, *, temperature_is_zero: bool
) -> Drawn:
    """How a drafter chooses children; `Drawn("top_k")` without one."""
    if drafter is None:
        return Drawn()
    drawn = drafter.child_sampling(topology, temperature_is_zero=temperature_is_zero)
    return drawn if isinstance(drawn, Drawn) else Drawn(drawn)


def draft_models(drafter: Drafter | None) -> list[HybridLM]:
    """The draft models of a drafter, if there is one."""
    return [] if drafter is None else list(drafter.models())


def with_tokens_of(drafter: Any, target: HybridLM) -> Any:
    """The drafter, with draft models that give logits of the target's tokens."""
    vocab_size = target.config.vocab_size
    if all(model.for_tokens(vocab_size) is model for model in draft_models(drafter)):
        return drafter
    parts, structure = jax.tree.flatten(drafter, is_leaf=lambda part: isinstance(part, HybridLM))
    fitted = [part.for_tokens(vocab_size) if isinstance(part, HybridLM) else part for part in parts]
    return jax.tree.unflatten(structure, fitted)


def first_state(
    drafter: Drafter, lengths: Int[Array, " B"], topology: TreeTopology, max_length: int
) -> Any:
    """A drafter's state before any text, on the devices of `lengths`, an array of the rows."""
    state = drafter.init(len(lengths), topology, max_length)
    check_like(f"{type(drafter).__name__}.init: state", state, state)
    return placed_like(lengths, state)


def inner_layers(drafter: Drafter | None) -> tuple[int, ...] | None:
    """Which hidden states the drafter gets, see `Drafter`."""
    return None if drafter is None else drafter.inner_layers


def root_token(context: Context) -> Int[Array, "B 1"]:
    """The last token of each row, which no cache has read."""
    return jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)


def root_only(context: Context) -> DraftTree:
    """The tree of autoregressive decoding: the root, and no draft."""
    root = root_token(context)
    tree = TreeTopology.chain(0).tree(jnp.ones_like(root, bool))
    return DraftTree.of(root, tree)
