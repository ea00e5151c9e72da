"""A DFlash head: some Qwen3 layers that fill a block of masked tokens in one pass.

DFlash (arXiv:2602.06036), in the layout of z-lab's heads. With s the target's residual stream after
some of its layers, the context of a token before the root is

    c_p = norm(fc [s1_p ; s2_p ; ...])

The block is the root and masked tokens after it, embedded by the target. In each layer its keys and
values follow those that the layer makes of the context. All places of the block see each other; in
a layer with a window a place sees itself and those before it. The target's output head, or the
head's own, turns the normed output of a place into logits.

DSpark (arXiv:2607.05147) in the layout of DeepSpec's heads: the same, but the output of a place is
of the token after it, so the root's place has one too; a low-rank bias of the token before (the
Markov head) is added to the logits. With h the output of a place and m the row of that token in the
Markov embedding, the confidence head's

    c = sigmoid(w [h ; m] + b)

estimates `1 - |q - p| / 2`, the mass that the draft's probabilities q of the place share with the
target's p: the chance that a draft is accepted if those before it are.

DFlash 2 (`DFlash2DraftModel`): the first K tokens of a place, by its logits U, are its candidates.
With A and B the rows of two tables, a the token before and h the output of the place

    S(a, b) = U(b) + <A(a) * H h, B(b)>

So it is a Markov head whose rows are scaled, among candidates. Around the attention and the MLP of
a layer are short convolutions over the places of a block, zero before the root. With u the normed
input of the two, and k of each channel plus p(u) of each group of channels,

    x_t = sum_o (k_o + p_o(u_t)) * x_(t - o)

with one k and one p of the input, and another of the output. vLLM's `qwen3_dflash2.py` and
Qualcomm's QEfficient agree on all of this.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import KVCache, NodeKV
from stree_jax import AttentionConfig, MlpConfig, Tree
from stree_jax.array_types import Array, Float, Float32, Int
from stree_jax.checks import require, require_integer
from stree_jax.models import DraftHead, TargetHead, require_inner_layers


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """The config of a head.

    Attributes:
        d_model: width of the target and of the head.
        vocab_size: tokens of the target.
        mask_token: the token whose embedding stands for one that is not known.
        block_size: tokens of a block, with the root.
        inner_layers: the numbers of layers of the target after which its states are taken,
            ascending.
        attention, mlp: the two parts of a layer.
        windows: of each layer, the tokens that it sees, see `AttentionConfig`; None: all.
        shifted: whether the output of a place is of the token after it, not of its own.
        norm_eps: epsilon of all norms.
        own_tokens: whether the head has an embedding and an output head.
        causal: whether a place in a layer with a window sees no later one. Others see all.
        conv_width, conv_group: taps of the convolutions, and channels of a group; 0: there is none.
        markov_rank: rank of the Markov head; 0: there is none.
        candidates: tokens that may follow a token, with rows of the Markov head that are scaled; 0:
            all, and rows as they are.
        confidence_head: what the confidence head reads: "hidden", the output of a place; "markov",
            the row of the Markov embedding too; "none": there is none.
    """

    d_model: int
    vocab_size: int
    mask_token: int
    block_size: int
    inner_layers: tuple[int, ...]
    attention: AttentionConfig
    mlp: MlpConfig
    windows: tuple[int | None, ...]
    shifted: bool = False
    norm_eps: float = 1e-6
    own_tokens: bool = False
    causal: bool = True
    conv_width: int = 0
    conv_group: int = 16
    markov_rank: int = 0
    candidates: int = 0
    confidence_head: str = "none"

    def __post_init__(self) -> None:
        for name in ("d_model", "vocab_size", "block_size", "conv_group"):
            require_integer(self, name, 1)
        for name in ("mask_token", "markov_rank", "conv_width", "candidates"):
            require_integer(self, name, 0)
        require_inner_layers(self.inner_layers)
        require(
            len(self.windows) > 0 and self.num_drafts > 0,
            f"a block of {self.block_size} with {len(self.windows)} layers has no drafts",
        )
        require(
            self.d_model % self.conv_group == 0 or not self.conv_width,
            f"conv_group {self.conv_group} must divide d_model {self.d_model}",
        )
        narrowest = min((window for window in self.windows if window), default=self.block_size)
        require(
            self.causal or narrowest >= self.block_size,
            f"a window of {narrowest} is less than a block of {self.block_size} that sees itself",
        )
        require(
            self.candidates <= self.vocab_size and (not self.candidates or self.markov_rank > 0),
            f"candidates {self.candidates} need a markov_rank, got {self.markov_rank}, and at most"
            f" {self.vocab_size} tokens",
        )
        num_kinds = 1 if self.candidates else 3 if self.markov_rank else 2
        kinds = ("none", "hidden", "markov")[:num_kinds]
        require(
            self.confidence_head in kinds,
            f"confidence_head {self.confidence_head!r:.80} with markov_rank {self.markov_rank} must"
            f" be one of {kinds}",
        )
        attention = self.attention
        require(
            attention.input_multiple == 1
            and not (attention.conv_width or attention.mlp_dim or attention.output_gate),
            f"attention of a DFlash head has no convolution, branch or gate: {attention!r:.200}",
        )

    @property
    def num_drafts(self) -> int:
        """Most drafts on a path."""
        return self.block_size - (not self.shifted)


class GroupedConv(TargetHead):
    """The convolutions before and after a part of a layer, which begin as the identity."""

    base_kernel: nnx.Param
    scales = ()

    def make(self, rngs: nnx.Rngs, implementation: str | None) -> None:
        c = self.config
        first = jnp.zeros((2, c.conv_width, c.d_model), self.dtype)
        self.base_kernel = nnx.Param(first.at[:, 0].set(1.0))
        groups = c.d_model // c.conv_group
        self.kernel_projection = self.linear(c.d_model, 2 * c.conv_width * groups, rngs)
        self.kernel_projection.kernel.set_value(0.0 * self.kernel_projection.kernel[...])

    def around(self, u: Float[Array, "B Q M"], x: Array, side: int) -> Float[Array, "B Q M"]:
        """The input (side 0) or the output (1) of a part, by the normed input u of the part."""
        c, groups = self.config, self.config.d_model // self.config.conv_group
        taps = self.kernel_projection(u).reshape(*u.shape[:2], 2, c.conv_width, groups, 1)
        kernel = self.base_kernel[side].reshape(c.conv_width, groups, -1)
        y = jnp.zeros_like(x)
        for offset in range(c.conv_width):
            shifted = jnp.pad(x, ((0, 0), (offset, 0), (0, 0)))[:, : x.shape[1]]
            weights = kernel[offset] + taps[:, :, side, offset]
            y += weights.reshape(x.shape).astype(x.dtype) * shifted
        return y


class DFlashLayer(DraftHead):
    """A layer, whose entries are the places of a block."""

    attention_conv: GroupedConv | None
    mlp_conv: GroupedConv | None
    scales = ("hidden_norm_scale", "feed_forward_norm_scale")

    def make(self, rngs: nnx.Rngs, implementation: str | None) -> None:
        self.attention = self.layer(self.config.attention, rngs, implementation)
        self.feed_forward = self.layer(self.config.mlp, rngs, implementation)
        self.is_block = self.config.attention.window is None or not self.config.causal

        def conv() -> GroupedConv | None:
            c = self.config
            return GroupedConv(c, dtype=self.dtype, rngs=rngs) if c.conv_width else None

        self.attention_conv, self.mlp_conv = conv(), conv()

    def joined(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        u = self.norm(states, self.hidden_norm_scale)
        return u if self.attention_conv is None else self.attention_conv.around(u, u, 0), states

    def attended(self, y: Array, residual: Array) -> Array:
        if self.attention_conv is None:
            return y
        return self.attention_conv.around(self.norm(residual, self.hidden_norm_scale), y, 1)

    def fed(self, x: Array) -> Array:
        if self.mlp_conv is None:
            return super().fed(x)
        u = self.norm(x, self.feed_forward_norm_scale)
        y = self.feed(self.mlp_conv.around(u, u, 0))
        return self.mlp_conv.around(u, y, 1)


class DFlashHead(TargetHead):
    """A head with some layers, and perhaps a Markov head and a confidence head.

    Its arguments are those of `TargetHead`, with a `DFlashConfig`.
    """

    config: DFlashConfig
    embedding: Any
    output_head: Any
    markov_embedding: Any
    markov_head: Any
    selector: Any
    confidence_head: Any

    def make(self, rngs: nnx.Rngs, implementation: str | None) -> None:
        c, options = self.config, dict[str, Any](dtype=self.dtype, rngs=rngs)
        self.fc = self.linear(len(c.inner_layers) * c.d_model, c.d_model, rngs)
        options["implementation"] = implementation
        parts = (dataclasses.replace(c.attention, window=window) for window in c.windows)
        self.layers = nnx.List(
            DFlashLayer(dataclasses.replace(c, attention=part), **options) for part in parts
        )
        sizes = {"embedding": c.d_model, "output_head": c.d_model} if c.own_tokens else {}
        if c.markov_rank:
            sizes |= {"markov_embedding": c.markov_rank, "markov_head": c.markov_rank}
        for name, width in sizes.items():
            setattr(self, name, self.table(c.vocab_size, width, rngs))
        if c.candidates:
            self.selector = self.linear(c.d_model, c.markov_rank, rngs)
        if c.confidence_head != "none":
            width = c.d_model + c.markov_rank * (c.confidence_head == "markov")
            self.confidence_head = self.linear(width, 1, rngs, bias=True)

    @property
    def activation_dtype(self) -> Any:
        """Dtype of activations and caches: float32 if the head is packed."""
        return self.fc.kernel.storage.dtype

    def init_cache(self, batch: int, max_length: int) -> tuple[KVCache, ...]:
        """The caches of the layers before the first token."""
        return tuple(layer.init_cache(batch, max_length) for layer in self.layers)

    def entries(self, hidden: Float[Array, "B T _"], positions: Int[Array, "B T"]) -> list[NodeKV]:
        """Keys and values of each layer for tokens, from the target's inner states."""
        with jax.named_scope("head_entries"):
            context = self.norm(self.fc(hidden), self.hidden_norm_scale)
            context = context.astype(self.activation_dtype)
            return [layer.attention.entries(context, positions) for layer in self.layers]

    def __call__(
        self, embedded: Float[Array, "B Q M"], caches: tuple[KVCache, ...]
    ) -> Float[Array, "B Q M"]:
        """Returns the outputs at all places of a block that follows the caches."""
        x, (batch, size, _) = embedded.astype(self.activation_dtype), embedded.shape
        steps, itself = np.arange(size, dtype=np.int32), np.eye(size, dtype=bool)
        for layer, cache in zip(self.layers, caches, strict=True):
            before, mask = None, np.tri(size, dtype=bool)
            if layer.is_block:
                # Kernels skip later nodes. So the keys of the other places come first.
                before = layer.entries(x, x, cache.length[:, None] + steps)
                mask = np.concatenate([~itself, itself], axis=1)
            depth = np.resize(steps, mask.shape[1])
            row = depth, depth, mask, np.ones(mask.shape[1], bool)
            tree = Tree(*(jnp.broadcast_to(leaf, (batch, *leaf.shape)) for leaf in row))
            x, _ = layer.tree(x, x, tree, cache, before)
        return self.norm(x, self.final_norm_scale)

    def after(self, rows: Float[Array, "B T R"]) -> Float32[Array, "B T V"]:
        """What a token, by its row of the Markov embedding, adds to the logits of the next one."""
        return self.markov_head.product(rows, wide=True, implementation=self.implementation)

    def pairs(
        self, rows: Float[Array, "*rows R"], candidates: Int[Array, "*rows K"]
    ) -> Float32[Array, "*rows K"]:
        """What a token, by its scaled row, adds to the logits of the candidates after it."""
        batch, *shape, rank = rows.shape
        after = self.markov_head.rows(candidates.reshape(batch, -1))
        after = after.reshape(batch, *shape, -1, rank).astype(jnp.float32)
        return (rows.astype(jnp.float32)[..., None, :] * after).sum(axis=-1)

    def confidence(self, outputs: Float[Array, "*rows _"]) -> Float32[Array, "*rows"]:
        """Logits of the confidence head, from outputs and, if given, rows of the Markov head."""
        projection = self.confidence_head
        inputs = outputs[..., : projection.kernel.shape[0]]
        return projection.biased(projection.wide(inputs))[..., 0]
