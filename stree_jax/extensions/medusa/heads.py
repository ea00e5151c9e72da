"""Medusa heads: small layers on a model's last hidden state that predict tokens further ahead.

Medusa-1 (Cai et al., 2024, arXiv:2401.10774), with the output head of the model itself.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from stree_jax import HybridLM
from stree_jax.array_types import Array, Float
from stree_jax.checks import check_int
from stree_jax.models import check_model, contract

MAX_HEADS = 16


class MedusaHeads(nnx.Module):
    """Heads for a target: each predicts one token further ahead.

    With h the hidden state after a token x, and y the target's next token, head d = 1, 2, ...
    predicts the token d positions after y.

    Head d is `h + silu(h W_d + b_d)`, followed by the target's own output head. The heads are
    initialised to zero: each predicts the target's next token.

    Args:
        target: the model; gives sizes and dtype only.
        num_heads: number of heads, and of tokens ahead.
        rngs: random streams, as for every module; unused, since the heads start at zero.
        dtype: dtype of the heads' weights; None: the target's dtype.

    Raises:
        ValueError: `target` is not a model, or `num_heads` is not from 1 to `MAX_HEADS`.
    """

    def __init__(
        self,
        target: HybridLM,
        *,
        num_heads: int = 4,
        rngs: nnx.Rngs,
        dtype: DTypeLike | None = None,
    ):
        check_model(target)
        check_int("num_heads", num_heads, 1, MAX_HEADS)
        width = target.config.d_model
        zeros, dtype = nnx.initializers.zeros_init(), target.dtype if dtype is None else dtype
        self.kernel = nnx.Param(zeros(rngs.params(), (num_heads, width, width), dtype))
        self.bias = nnx.Param(zeros(rngs.params(), (num_heads, width), dtype))

    @property
    def num_heads(self) -> int:
        """Number of heads, and of tokens ahead that the last one predicts."""
        return self.bias.shape[0]

    def __call__(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T heads M"]:
        """Hidden states of all heads, which `HybridLM.logits` maps to logits, head by head.

        Args:
            hidden: the target's hidden states after its final norm.
        """
        with jax.named_scope("medusa_heads"):
            inner = contract("btm,hmn->bthn", hidden, self.kernel[...]) + self.bias[...]
            added = jax.nn.silu(inner.astype(jnp.float32))
            return (hidden[:, :, None] + added).astype(hidden.dtype)
