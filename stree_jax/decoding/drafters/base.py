"""The protocol of drafters: what proposes a tree of tokens for the target to verify."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from stree_jax.array_types import Array, Float, Int, Key
from stree_jax.decoding.types import Context, DraftTree, Sampling, Verdict
from stree_jax.tree import TreeTopology


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft trees inside the decode loop.

    A drafter is a pytree (weights are leaves, settings are part of its structure; an `nnx.Module`
    is one) with methods that change nothing: what it remembers between steps is the state that they
    take and return, a pytree of arrays with the batch axis first. All but the first two methods
    are traced.
    """

    def default_topology(self) -> TreeTopology:
        """The tree to use when the user names none."""
        ...

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> str:
        """How siblings are chosen, one of `CHILD_SAMPLING`; the verifier must be exact for it.

        "top_k" stands for any choice that does not depend on random numbers.

        Raises:
            ValueError: the drafter's settings do not work at this temperature.
        """
        ...

    def prepare(self, context: Context, topology: TreeTopology, max_length: int) -> Any:
        """The state before the first step. The context's last token, the root, is not read yet.

        No row will have more than `max_length` tokens, prompt included.
        """
        ...

    def propose(
        self,
        state: Any,
        context: Context,
        keys: Key[Array, " B"],
        sampling: Sampling,
        topology: TreeTopology,
    ) -> tuple[DraftTree, Any]:
        """Grows a tree below the context's last token. `topology` has its nodes in level order."""
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
            state: from `propose`.
            draft: the tree that was verified.
            verdict: the path after any cut by the end of a row; `last` is -1 for rows that have
                ended.
            topology: of the tree.
            hidden: the target's hidden state at `verdict.last`, after its final norm; anything for
                rows that have ended.
        """
        ...


def root_token(context: Context) -> Int[Array, "B 1"]:
    """The last token of each row, which no cache has read."""
    return jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)


def root_only(context: Context) -> DraftTree:
    """The tree of autoregressive decoding: the root, and no draft."""
    root = root_token(context)
    tree = TreeTopology.chain(0).tree(jnp.ones_like(root, bool))
    return DraftTree(root, tree, None, jnp.full(1, -1, jnp.int32), jnp.ones(root.shape[0], bool))
