"""A layer of the stack: a pre-norm and a mixer."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from stree_jax.models.config import ModelConfig
from stree_jax.models.layer import LayerConfig


class Block(nnx.Module):
    """A layer: pre-norm and mixer. The model adds its output to the residual stream."""

    def __init__(
        self,
        layer: LayerConfig,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        implementation: str | None,
    ):
        self.kind, self.is_shared = layer.kind, layer.is_shared
        # A "shared" layer has its norm among the weights that it shares.
        self.norm_scale = None if self.is_shared else nnx.Param(jnp.ones(config.d_model, dtype))
        self.mixer = layer.build(
            config.d_model,
            norm_eps=config.norm_eps,
            dtype=dtype,
            rngs=rngs,
            out_scale=len(config.layers) ** -0.5,
            implementation=implementation,
        )
