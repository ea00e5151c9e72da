"""A multi-token-prediction head as a draft model."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import KVCache, NodeKV
from stree_jax import Context, HybridLM, Tree
from stree_jax.array_types import Array, Float, Float32, Int
from stree_jax.decoding import HeadReader
from stree_jax.models import (
    MtpHead,
    check_on_one_device,
    embedded_tokens,
    output_logits,
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

    def open(self, context: Context, num_nodes: int, max_length: int) -> HeadReader:
        """See `DraftModel`: no text is read yet; `hear` reads it."""
        batch = context.length.shape[0]
        return HeadReader.open(
            self.head.init_cache(batch, max_length), self.config.d_model, self.head.dtype
        )

    def hear(
        self,
        reader: HeadReader,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T _"],
        lengths: Int[Array, " B"],
    ) -> HeadReader:
        """See `DraftModel`."""
        return reader.absorb(self, tokens, hidden, lengths)

    def states(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """See `Head`."""
        return hidden

    def entries(
        self,
        tokens: Int[Array, "B N"],
        above: Float[Array, "B N M"],
        positions: Int[Array, "B N"],
    ) -> NodeKV:
        """See `Head`."""
        return self.head.entries(self.embedded(tokens), above)

    def outputs(
        self,
        tokens: Int[Array, "B Q"],
        above: Float[Array, "B Q M"],
        tree: Tree,
        cache: KVCache,
        prefix: NodeKV | None,
    ) -> tuple[Float[Array, "B Q M"], Float[Array, "B Q M"], NodeKV]:
        """See `Head`."""
        output, kv = self.head.tree(self.embedded(tokens), above, tree, cache, prefix)
        return output, output, kv

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
