"""A multi-token-prediction head as a draft model, and its state between steps.

All that a drafter keeps follows from the text: keys and values of the pairs (token, target's state
before it), and the target's last state. What the head itself outputs feeds the nodes below, within
a step, and is then forgotten. So the drafts depend on the text alone, however it was cut into
prompt, pieces, steps and forks.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import KVCache, NodeKV, replay_kv
from stree_jax import Context, DraftTree, HybridLM, Tree, Verdict
from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding import nodes_so_far, recorded
from stree_jax.models import (
    MtpHead,
    check_on_one_device,
    embedded_tokens,
    output_logits,
    path_to,
)


class MtpPending(NamedTuple):
    """What a step keeps of the nodes that the head has run."""

    kv: NodeKV
    hidden: Float[Array, "B N M"]  # outputs of the head, inputs of the nodes' children


class MtpReader(NamedTuple):
    """The state of a head, a `NodeReader`.

    After a text of n tokens the cache has n - 2 entries, of tokens 1 to n - 2 and the target's
    states before them. The first token is in no entry, and the last is the root of the next tree,
    whose own entry is made when it is read.
    """

    kv: KVCache
    hidden: Float[Array, "B M"]  # the target's state before the root
    known: Bool[Array, " B"]  # False for a text of one token, which has no such state
    pending: MtpPending | None = None  # within a step

    @property
    def num_before(self) -> int:
        """See `NodeReader`."""
        return 0

    @property
    def ready(self) -> Bool[Array, " B"]:
        """See `NodeReader`."""
        return self.known

    @property
    def replays(self) -> bool:
        """See `NodeReader`."""
        return False

    def read(
        self,
        model: "MtpModel",
        tokens: Int[Array, "B Q"],
        tree: Tree,
        nodes: np.ndarray | Int[Array, " Q"],
        num_logits: int | None = None,
    ) -> tuple[Float32[Array, "B Z V"], "MtpReader"]:
        """See `Reader.read`. The root is read alone."""
        begins = isinstance(nodes, np.ndarray) and nodes[0] == 0
        pending = None if begins else self.pending
        if pending is None:
            above, prefix = self.hidden[:, None], None
        else:
            parents = tree.parents[:, jnp.minimum(nodes, tree.parents.shape[1] - 1), None]
            above, prefix = jnp.take_along_axis(pending.hidden, parents, axis=1), pending.kv
        output, kv = model.head.tree(
            model.embedded(tokens), above, nodes_so_far(tree, nodes), self.kv, prefix
        )
        hidden = output
        if pending is not None:
            hidden = jnp.concatenate([pending.hidden, output], axis=1)
        record = recorded(pending, MtpPending(kv, hidden), nodes)
        num_logits = tokens.shape[1] if num_logits is None else num_logits
        logits = model.logits(output[:, tokens.shape[1] - num_logits :])
        return logits, self._replace(pending=record)

    def rest(self) -> "MtpReader":
        """See `NodeReader`: drafts of a step leave nothing behind."""
        return self._replace(pending=None)

    def close(
        self,
        tree: object,
        place: object,
        draft: DraftTree,
        verdict: Verdict,
        model: "MtpModel",
        hidden: Float[Array, "B N M"],
    ) -> "MtpReader":
        """See `NodeReader`: appends the entries of the accepted path, with the target's states."""
        above = jnp.take_along_axis(hidden, jnp.maximum(draft.tree.parents, 0)[..., None], axis=1)
        above = above.at[:, 0].set(self.hidden)
        path = path_to(draft.tree, verdict.last).mask
        return self._with(model, draft.tokens, above, path, hidden, verdict.last)

    def absorb(
        self,
        model: "MtpModel",
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T M"],
        count: Int[Array, " B"],
    ) -> "MtpReader":
        """The state after the next `count` tokens of a text, which the target has read.

        Args:
            model: the head.
            tokens: the tokens, then padding.
            hidden: the target's states after them.
            count: number of tokens of each row.
        """
        above = jnp.concatenate([self.hidden[:, None], hidden[:, :-1]], axis=1)
        read = jnp.arange(tokens.shape[1]) < count[:, None]
        return self._with(model, tokens, above, read, hidden, count - 1)

    def _with(
        self,
        model: "MtpModel",
        tokens: Int[Array, "B N"],
        above: Float[Array, "B N M"],
        read: Bool[Array, "B N"],
        hidden: Float[Array, "B N M"],
        last: Int[Array, " B"],
    ) -> "MtpReader":
        """The state after the tokens that were read.

        Args:
            model: the head.
            tokens: tokens in order, the first of them after those of the state.
            above: the target's state before each.
            read: which of them were read.
            hidden: the target's state after each.
            last: the last token that was read; -1: none was, and the row keeps its state.
        """
        first = jnp.arange(tokens.shape[1]) == 0
        entries = model.head.entries(model.embedded(tokens), above)
        runs, at = last >= 0, jnp.maximum(last, 0)[:, None, None]
        new = jnp.take_along_axis(hidden, at, axis=1)[:, 0].astype(self.hidden.dtype)
        return MtpReader(
            kv=replay_kv(self.kv, entries, read & (self.known[:, None] | ~first)),
            hidden=jnp.where(runs[:, None], new, self.hidden),
            known=self.known | runs,
        )


class MtpModel(nnx.Module):
    """A head with embedding and output head of its target: a draft model for drafters of trees.

    `MtpDrafter` fills static trees. `BeamDrafter(MtpModel(target, head))` and
    `DynamicDrafter(MtpModel(target, head))` choose the shape of theirs.

    Args:
        target: the model that `generate` decodes with, on one device.
        head: a head for that model.

    Raises:
        ValueError: something else, or a head of another width or dtype.
    """

    def __init__(self, target: HybridLM, head: MtpHead):
        check_on_one_device(target, "MtpModel")
        if not isinstance(head, MtpHead):
            raise ValueError(
                f"head must be an MtpHead, got {type(head).__name__}; load it with load_mtp"
            )
        have, want = (head.config.d_model, head.dtype), (target.config.d_model, target.dtype)
        if have != want:
            raise ValueError(
                f"the head has width {have[0]} and dtype {have[1]}, and the target has {want[0]}"
                f" and {want[1]}; load it with load_mtp(path, target)"
            )
        self.head = head
        self.embedding = target.embedding
        self.output_head = target.head  # None: tied to the embedding
        self.config = target.config

    def check_target(self, target: HybridLM) -> None:
        """See `DraftModel`."""
        check_on_one_device(target, "a multi-token-prediction head")
        have, want = self.embedding.shape, target.embedding.shape
        if have != want or (self.output_head is None) != (target.head is None):
            raise ValueError(
                f"the head is of a model with an embedding of shape {have}, and the target's is"
                f" {want}; make the drafter with the target that generate gets"
            )

    def open(self, context: Context, num_nodes: int, max_length: int) -> MtpReader:
        """See `DraftModel`: no text is read yet; `hear` reads it."""
        batch = context.length.shape[0]
        return MtpReader(
            kv=self.head.init_cache(batch, max_length),
            hidden=jnp.zeros((batch, self.config.d_model), self.head.dtype),
            known=jnp.zeros(batch, bool),
        )

    def hear(
        self,
        reader: MtpReader,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T M"],
        lengths: Int[Array, " B"],
    ) -> MtpReader:
        """See `DraftModel`."""
        return reader.absorb(self, tokens, hidden, lengths)

    def ahead(
        self, tokens: Int[Array, "B T"], hidden: Float[Array, "B T M"], depth: int
    ) -> list[Float[Array, "B T M"]]:
        """Outputs of the head at every position of texts, as a chain of drafts has them there.

        Entry p of output k = 0, 1, ... predicts token p + 2 + k, in the step whose root is token
        p + 1: it has read the true entries 0 to p, and then the tokens p + 2 to p + 1 + k with the
        head's own outputs. Worked example, three tokens and depth 2: the query of the second
        level at p = 0 attends to the first entry of level 0, and to its own level alone:

            [1 0 0 | 1 0 0]   p = 0
            [1 1 0 | 0 1 0]   p = 1
            [1 1 1 | 0 0 1]   p = 2

        Args:
            tokens: the texts.
            hidden: the target's states at all tokens.
            depth: number of outputs.

        Returns:
            The outputs, each with `T` entries; those that need tokens behind the end of the text
            mean nothing.
        """
        batch, length = tokens.shape
        cache = self.head.init_cache(batch, 0)
        outputs: list[Array] = []
        above, prefix = hidden, None
        for level in range(depth):
            places = jnp.minimum(jnp.arange(length) + 1 + level, length - 1)
            itself = np.eye(length, dtype=bool)
            mask = np.concatenate([np.tri(length, dtype=bool), *[itself] * level], axis=1)
            nodes = np.zeros((batch, mask.shape[1]), np.int32)  # the mask alone matters
            tree = Tree(
                jnp.asarray(nodes),
                jnp.asarray(nodes),
                jnp.broadcast_to(mask, (batch, *mask.shape)),
                jnp.ones(nodes.shape, bool),
            )
            above, prefix = self.head.tree(
                self.embedded(tokens[:, places]), above, tree, cache, prefix
            )
            outputs.append(above)
        return outputs

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """The target's embeddings."""
        return embedded_tokens(tokens, self.embedding[...], self.config.embedding_multiplier)

    def logits(self, hidden: Float[Array, "B T M"]) -> Float32[Array, "B T V"]:
        """Logits of the head's outputs, without vocabulary padding."""
        weights = self.embedding if self.output_head is None else self.output_head
        logits = output_logits(hidden, weights[...], self.config.logits_multiplier)
        return logits[..., : self.config.vocab_size]
