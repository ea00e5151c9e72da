"""Medusa heads: small layers on a model's last hidden state that predict tokens further ahead.

Medusa-1 (Cai et al., 2024, arXiv:2401.10774), sharing the output head of the model.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax import HybridLM
from stree_jax.array_types import Array, Float
from stree_jax.checks import check_int
from stree_jax.models import Matrix, check_model

MAX_HEADS = 16


class MedusaHeads(nnx.Module):
    """Heads for a target, up to `MAX_HEADS`: each predicts one token further ahead.

    With h the hidden state after a token x, and y the token that the target predicts next, head
    d = 1, 2, ... predicts the token d positions after y.

    Head d computes `h + silu(h W_d + b_d)`, and the target's output head turns that into logits.
    Weights are initialized to zero, so each head first predicts what the target predicts next, and
    `rngs` is not used. They have the target's dtype.
    """

    def __init__(self, target: HybridLM, *, num_heads: int = 4, rngs: nnx.Rngs):
        check_model(target)
        check_int("num_heads", num_heads, 1, MAX_HEADS)
        width, dtype, zeros = target.config.d_model, target.dtype, nnx.initializers.zeros_init()
        self.kernel = Matrix(zeros(rngs.params(), (num_heads, width, width), dtype))
        self.bias = nnx.Param(zeros(rngs.params(), (num_heads, width), dtype))

    @property
    def num_heads(self) -> int:
        """Number of heads; the last one predicts this many tokens ahead."""
        return self.bias.shape[0]

    def __call__(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T heads M"]:
        """Returns all heads' states from the target's after its final norm."""
        with jax.named_scope("medusa_heads"):
            inner = self.kernel.product(hidden, wide=True)
            inner = inner + self.bias[...].astype(inner.dtype)[None, None]
            added = jax.nn.silu(inner.astype(jnp.float32))
            return (hidden[:, :, None].astype(jnp.float32) + added).astype(hidden.dtype)
