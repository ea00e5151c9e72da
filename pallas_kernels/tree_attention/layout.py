"""Columns of an attention projection, and how queries and keys are normed and rotated."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.numerics import rounded, scaled, static
from pallas_kernels.rms_norm.api import rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """Root-mean-square norms of each head's query and key, before they are rotated."""

    query_weight: Float[Array, " E"]
    key_weight: Float[Array, " E"]
    epsilon: float = static()


@dataclasses.dataclass(frozen=True)
class AttentionLayout:
    """Columns `[... | q | k | v | ...]` of the input projection of an attention layer.

    Attributes:
        num_heads: query heads `W`.
        num_groups: key and value heads `U`; query head w uses head `w // (W / U)` of them.
        head_dim: channels of a head `E`.
        scale: multiplies the scores.
        frequencies: radians per position of each rotated pair of channels `R`. A pair is channels
            `i` and `R + i` (as in GPT-NeoX); channels from `2 R` on are not rotated.
        key_multiplier: multiplies the keys before rotation, rounded to their dtype (Falcon-H1).
        first_column: columns before q.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    scale: float
    frequencies: tuple[float, ...] = ()
    key_multiplier: float = 1.0
    first_column: int = 0

    @property
    def num_columns(self) -> int:
        """Columns of q, k and v."""
        return (self.num_heads + 2 * self.num_groups) * self.head_dim

    def split(
        self,
        projected: Float[Array, "B T X"],
        positions: Int[Array, "B T"],
        norms: HeadNorms | None = None,
        implementation: str | None = None,
    ) -> tuple[Array, Array, Array]:
        """Queries `[B, T, W, E]`, keys and values `[B, T, U, E]`, rotated to their positions.

        The implementation is that of `rms_norm`, for the norms.
        """
        heads = projected[..., self.first_column : self.first_column + self.num_columns]
        if dispatch.on_tpu():  # a product whose result has an axis of heads transposes its weight
            heads = lax.optimization_barrier(heads)
        heads = heads.reshape(*heads.shape[:-1], -1, self.head_dim)
        query, keys, values = jnp.split(
            heads, (self.num_heads, self.num_heads + self.num_groups), axis=-2
        )
        if norms is not None:
            norm = functools.partial(rms_norm, epsilon=norms.epsilon, implementation=implementation)
            query = norm(query, norms.query_weight).astype(query.dtype)
            keys = norm(keys, norms.key_weight).astype(keys.dtype)
        keys = scaled(keys, self.key_multiplier)
        if self.frequencies:
            frequencies = jnp.array([[self.frequencies]], jnp.float32)
            angles = rounded(positions[..., None].astype(jnp.float32) * frequencies)
            query, keys = _rotated(query, angles), _rotated(keys, angles)
        return query, keys, values


def _rotated(x: Float[Array, "B T W E"], angles: Float[Array, "B T R"]) -> jax.Array:
    """Rotary embedding of heads by these angles, in float32."""
    half = angles.shape[-1]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    turned = rounded(first * cos) - rounded(second * sin)
    rotated = [turned, rounded(second * cos) + rounded(first * sin), rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
