"""A layer of the stack, and the residual stream between layers while a forward pass is traced."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import DeferredRMSNorm, add_rms_norm, rms_norm
from pallas_kernels.matmul import normed_product
from pallas_kernels.numerics import Product, total
from stree_jax.array_types import Array
from stree_jax.models.config import ModelConfig
from stree_jax.models.layer import LayerConfig
from stree_jax.models.layers import LayerInput
from stree_jax.models.matrices import Matrix


class Block(nnx.Module):
    """A layer: norm and mixer. The model adds its output to the residual stream."""

    def __init__(
        self, layer: LayerConfig, config: ModelConfig, *, dtype: DTypeLike, **options: Any
    ):
        self.kind, self.is_shared = layer.kind, layer.is_shared
        self.norm_after, self.norms_input = layer.norm_after, layer.norms_input
        # A "shared" layer has its norm among the weights that it shares.
        scale = jnp.ones(config.d_model, jnp.float32 if config.norm_float32 else dtype)
        self.norm_scale = None if self.is_shared else nnx.Param(scale)
        self.post_norm_scale = nnx.Param(scale) if config.sandwich_norms else None
        self.mixer = layer.build(
            config.d_model,
            norm_eps=config.norm_eps,
            dtype=dtype,
            out_scale=len(config.layers) ** -0.5,
            **options,
        )


class _Normed(LayerInput):
    """The norm of a stream, with a scale."""

    def __init__(self, stream: "ResidualStream", scale: Array):
        self._stream, self._scale = stream, scale
        self._array: Array | None = None

    @property
    def is_read(self) -> bool:
        """So the stream has the output before."""
        return self._array is not None

    def total(self) -> Array:
        if self._array is None:
            self._array = self._stream.normed(self._scale)
        return self._array

    def product(self, matrix: Matrix, gate: str | None, implementation: str | None) -> Product:
        if self._array is None:
            results = self._stream.normed_product(self._scale, matrix, gate, implementation)
            if results is not None:
                self._array, product = results
                return product
        return matrix.product_in_parts(self.total(), gate=gate, implementation=implementation)


class ResidualStream:
    """Gives each layer its normed input, in one launch with adding the output before."""

    def __init__(
        self, embedded: Array, config: ModelConfig, dtype: DTypeLike, implementation: str | None
    ):
        self._embedded = self._hidden = embedded
        self._config, self._dtype, self._implementation = config, dtype, implementation
        # The last layer's output, not added yet; a shared layer's, for the next layer's input only.
        self._output: Product | DeferredRMSNorm | None = None
        self._extra: Array | None = None
        self._input: _Normed | None = None

    def read(self, block: Block) -> Array | LayerInput:
        """The input of a layer `[B, T, M]`; for a shared layer `[B, T, 2 M]`, not normed.

        A `LayerInput` has to be read before `write`.
        """
        if block.norm_scale is None:
            both = [self.hidden(), self._embedded]
            return jnp.concatenate(both, axis=-1).astype(self._dtype)
        if block.norm_after:
            return self.hidden().astype(self._dtype)
        self._input = _Normed(self, block.norm_scale[...])
        return self._input if block.norms_input else self._input.total()

    def write(self, block: Block, output: Product | DeferredRMSNorm) -> None:
        """Takes the output of the layer that read last."""
        assert self._input is None or self._input.is_read
        if block.is_shared:
            assert not isinstance(output, DeferredRMSNorm)
            self._output, self._extra = None, total(output).astype(self._hidden.dtype)
            return
        scale = block.norm_scale if block.norm_after else block.post_norm_scale
        if scale is not None:
            assert not isinstance(output, DeferredRMSNorm)
            normed = rms_norm(
                output,
                scale[...],
                epsilon=self._config.norm_eps,
                implementation=self._implementation,
            )
            output = normed.astype(output.dtype)
        self._output, self._extra = output, None

    def hidden(self) -> Array:
        """The stream `[B, T, M]` with the last layer's output added."""
        if self._output is not None:
            self.normed(jnp.ones(self._hidden.shape[-1], jnp.float32))
        return self._hidden

    def normed(self, scale: Array) -> Array:
        """The norm of `hidden()`, which the same op adds up, so that all sums round alike."""
        epsilon = self._config.norm_eps
        if self._output is None:
            hidden = self._hidden if self._extra is None else self._hidden + self._extra
            normed = rms_norm(hidden, scale, epsilon=epsilon, implementation=self._implementation)
            return normed.astype(self._dtype)
        self._hidden, normed = add_rms_norm(
            self._hidden,
            self._output,
            scale,
            epsilon=epsilon,
            multiplier=self._config.residual_multiplier,
            implementation=self._implementation,
        )
        self._output = None
        return normed

    def normed_product(
        self, scale: Array, matrix: Matrix, gate: str | None, implementation: str | None
    ) -> tuple[Array, Product] | None:
        """`normed` and its product in one kernel, or None if these are two."""
        storage = matrix.storage
        if self._output is None or storage.is_packed:
            return None
        results = normed_product(
            self._hidden,
            self._output,
            scale,
            storage.values,
            epsilon=self._config.norm_eps,
            multiplier=self._config.residual_multiplier,
            axis=storage.axis,
            gate=gate,
            implementation=implementation,
        )
        if results is None:
            return None
        self._hidden, normed, product = results
        self._output = None
        return normed, product
