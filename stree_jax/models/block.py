"""A layer of the stack, which is a pre-norm and a mixer; and the protocol of mixers."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import DeferredRMSNorm
from stree_jax.array_types import Array, Bool, Lengths
from stree_jax.config import ModelConfig
from stree_jax.models.attention import AttentionMixer
from stree_jax.models.cache import ConvGatherIndex, Path, Replay
from stree_jax.models.mamba2 import Mamba2Mixer
from stree_jax.models.mlp import Mlp
from stree_jax.models.moe import MixtureOfExperts
from stree_jax.models.parallel import ParallelMixer
from stree_jax.models.shared import SharedLayer
from stree_jax.tree import Tree


@runtime_checkable
class Mixer(Protocol):
    """A layer of any kind. Its cache and its pending record are opaque to all other code."""

    def __call__(
        self, u: Array, cache: Any, valid: Bool[Array, "B T"], lengths: Lengths
    ) -> tuple[Array, Any]:
        """Runs a right-padded sequence from `cache`; returns outputs and the cache after it."""
        ...

    def tree(
        self,
        u: Array,
        tree: Tree,
        conv_gather_index: ConvGatherIndex,
        cache: Any,
        prefix_pending: Any = None,
        replay: Replay | None = None,
    ) -> tuple[Array | DeferredRMSNorm, Any, Any]:
        """Runs the last nodes of a tree, after replaying a path of the previous tree, if any.

        Returns the outputs (their rows may still need a scale, which `add_rms_norm` applies), the
        pending record of all nodes, and the cache before the root.
        """
        ...

    def replay(
        self, cache: Any, pending: Any, path: Path, conv_gather_index: ConvGatherIndex
    ) -> Any:
        """The cache after a path."""
        ...


class Block(nnx.Module):
    """A layer: pre-norm and mixer. The model adds its output to the residual stream."""

    def __init__(
        self,
        kind: str,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        implementation: str | None,
    ):
        self.kind = kind
        # A "shared" layer has its norm among the weights that it shares.
        self.norm_scale = None if kind == "shared" else nnx.Param(jnp.ones(config.d_model, dtype))
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs, out_scale=len(config.layers) ** -0.5)
        with_kernels = options | dict(implementation=implementation)

        def mamba2() -> Mamba2Mixer:
            assert config.mamba2 is not None
            return Mamba2Mixer(config.mamba2, config.d_model, **with_kernels)

        def attention() -> AttentionMixer:
            assert config.attention is not None
            return AttentionMixer(config.attention, config.d_model, **with_kernels)

        self.mixer: Mixer | SharedLayer
        match kind:
            case "mamba2":
                self.mixer = mamba2()
            case "attention":
                self.mixer = attention()
            case "parallel":
                self.mixer = ParallelMixer(mamba2(), attention())
            case "mlp":
                assert config.mlp is not None
                self.mixer = Mlp(config.mlp, config.d_model, **options)
            case "moe":
                assert config.moe is not None
                self.mixer = MixtureOfExperts(config.moe, config.d_model, **with_kernels)
            case "shared":
                self.mixer = SharedLayer(config, **options)
            case _:
                raise AssertionError(kind)  # ModelConfig knows the kinds
