"""The protocol of drafters: objects that propose trees of tokens for the target to verify."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from stree_jax.array_types import Array, Float, Float32, Int, Key
from stree_jax.decoding.types import Context, DraftTree, Sampling, Verdict
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft trees inside the decode loop; `generate(drafter=...)` takes any such object.

    A drafter is a pytree, such as a `flax.nnx.Module`. Its array leaves are traced; its settings
    are part of the tree structure, so a program is compiled for each value of them.

    No method changes the drafter. Its memory between steps is a *state*: a pytree of arrays with
    the batch axis first, or None. `prepare` makes it, `propose` and `commit` take it and return it
    with the same structure, shapes and dtypes. The loop donates it, so `prepare` must return fresh
    arrays: none twice, and none that the drafter or the context holds.

    Order of calls:

        default_topology, child_sampling     in Python, before anything is compiled
        prepare                              once, not traced by the loop
        propose, commit                      every step, traced

    Rows are independent: what a row drafts depends on its own tokens, state and key alone.

    A drafter may also have these; all are used in Python, before anything is compiled:

        models()                its draft models, a list of `HybridLM`, which must have the target's
                                vocabulary and lie on its mesh; none by default
        check_target(target)    raises ValueError for a target that it cannot draft for
        runs_on_mesh = True     class attribute, not inherited: it drafts for a target on a mesh
        rank_trace(...)         for `tune`, if candidates depend on the depth of a node, see
                                `stree_jax.tuning.rank_trace`

    `docs/extending.md` explains each method, `examples/own_drafter.py` is one.
    """

    def default_topology(self) -> TreeTopology:
        """The draft tree if the user gives none."""
        ...

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> str:
        """How the children of a node are chosen.

        Verifiers decide by this name whether they are exact, so it must be true:

            "top_k"                 any choice without random numbers
            "shared"                by the `noise` that `propose` gets: the target uses it too
            "iid"                   independent samples of the draft's distribution
            "without_replacement"   samples of it, all different, in the order drawn
            "iid_by_depth", "without_replacement_by_depth"
                                    the same, drawn once for a depth, from a distribution that does
                                    not depend on the path; all nodes of the depth share the draws

        Any other name is accepted by the verifiers that follow the target ("greedy",
        "target_only") and refused by the other built-in ones.

        Args:
            topology: the draft tree, nodes in level order.
            temperature_is_zero: whether all rows have temperature 0.

        Raises:
            ValueError: the drafter cannot fill this topology, or not at this temperature.
        """
        ...

    def prepare(self, context: Context, topology: TreeTopology, max_length: int) -> Any:
        """The state before the first step.

        Args:
            context: the prompts. The last token of each is the root of the first tree.
            topology: the draft tree of every step, nodes in level order.
            max_length: most tokens of a row, prompt included.
        """
        ...

    def propose(
        self,
        state: Any,
        context: Context,
        keys: Key[Array, " B"],
        sampling: Sampling,
        topology: TreeTopology,
        noise: Float32[Array, "B _ V"] | None = None,
    ) -> tuple[DraftTree, Any]:
        """Grows a tree below each row's last token.

        Args:
            state: the state from `prepare` or `commit`.
            context: the text so far; its last token is the root.
            keys: one per row and step. Split a key before using it twice.
            sampling: the target's sampling settings, for `token_log_probs`.
            topology: sizes and, for a static tree, the shape: `topology.tree(valid)`. A tree of
                another shape needs `topology.num_nodes` nodes and at most `topology.depth` levels.
            noise: Gumbel noise of the next `topology.depth + 1` output positions, with which the
                target draws its tokens; None at temperature 0. Drafts that depend on it are
                "shared".

        Returns:
            The draft tree and the state. Nodes that a row lacks are not `valid`.
        """
        ...

    def commit(
        self,
        state: Any,
        draft: DraftTree,
        verdict: Verdict,
        topology: TreeTopology,
        hidden: Float[Array, "B M"],
    ) -> Any:
        """Advances the drafter along the accepted path.

        Args:
            state: the state from `propose`.
            draft: the tree that was verified.
            verdict: the accepted path, already cut at the end of sequence and at the token limit;
                `last` is -1 for rows that have ended, whose state must stay valid.
            topology: the topology given to `propose`.
            hidden: the target's hidden state at `verdict.last` after its final norm, in the
                target's dtype; unspecified for rows that have ended.

        Returns:
            The state for the next `propose`.
        """
        ...


def draft_models(drafter: Drafter | None) -> list[HybridLM]:
    """The draft models of a drafter; none if it has no method `models`."""
    models = getattr(drafter, "models", None)
    return list(models()) if callable(models) else []


def check_target(drafter: Drafter | None, target: HybridLM) -> None:
    """Calls the drafter's `check_target`, if it has one.

    Raises:
        ValueError: the drafter cannot draft for this target.
    """
    check = getattr(drafter, "check_target", None)
    if callable(check):
        check(target)


def runs_on_mesh(drafter: Drafter) -> bool:
    """Whether the drafter's own class declares it; a subclass may draft in another way."""
    return vars(type(drafter)).get("runs_on_mesh", False)


def root_token(context: Context) -> Int[Array, "B 1"]:
    """The last token of each row, which no cache has read."""
    return jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)


def root_only(context: Context) -> DraftTree:
    """The tree of autoregressive decoding: the root, and no draft."""
    root = root_token(context)
    tree = TreeTopology.chain(0).tree(jnp.ones_like(root, bool))
    return DraftTree(root, tree, None, jnp.full(1, -1, jnp.int32), jnp.ones(root.shape[0], bool))
