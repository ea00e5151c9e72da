"""The Mamba-2 mixer of every family: one class, the differences are knobs of `Mamba2Config`.

    z, x, B, C, dt = in_proj(u)
    x, B, C = silu(conv(x, B, C));   dt = clip(softplus(dt + dt_bias))
    state = exp(dt A) state + dt x (outer) B;   y = state C + D x
    out_proj(gated_norm(y, z))

Over a tree the gate, and of the norm all but the scale of each row, are `mamba2_tree`'s; a row's
scale commutes with the output projection, and is applied where the output is added.

The same algebra runs over a sequence (`__call__`) and over a tree (`tree`), and both read the
projection through one `Layout`, so that a clamp or a multiplier cannot differ between prefill and
decode.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import (
    Mamba2Pending,
    Mamba2Weights,
    Previous,
    Unscaled,
    gated_rms_norm,
    mamba2_tree,
    replay,
    replay_conv_state,
    ssd,
)
from pallas_kernels.numerics import scaled
from stree_jax.array_types import Array, Bool, Float, Lengths
from stree_jax.layer_config import Mamba2Config
from stree_jax.models.cache import ConvGatherIndex, Mamba2Cache, Path, Replay
from stree_jax.models.layers import (
    causal_conv1d,
    conv_state_after,
    linear,
    silu,
    split_last,
)
from stree_jax.tree import Tree


class Mamba2Mixer(nnx.Module):
    """One Mamba-2 mixer.

    Args:
        config: its shape and knobs.
        d_model: width of input and output.
        dtype: of the weights; `A_log`, `D` and `dt_bias` are float32 whatever it is.
        rngs: for initialisation, which follows the published models.
        out_scale: scales the initial output projection, for deep stacks.
        implementation: of the kernels, see `pallas_kernels.dispatch`.
    """

    def __init__(
        self,
        config: Mamba2Config,
        d_model: int,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        out_scale: float = 1.0,
        implementation: str | None = None,
    ):
        c = self.config = config
        self.implementation = implementation
        layout = c.layout
        self.in_proj = linear(
            d_model,
            layout.first_column + sum(layout.sizes),
            bias=c.in_proj_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.out_proj = linear(
            c.mlp_dim + c.inner_size,
            d_model,
            bias=c.out_proj_bias,
            dtype=dtype,
            rngs=rngs,
            scale=out_scale,
        )
        bound = 1 / math.sqrt(c.conv_width)
        self.conv_weight = nnx.Param(
            jax.random.uniform(
                rngs.params(),
                (c.conv_width, layout.num_channels),
                dtype,
                minval=-bound,
                maxval=bound,
            )
        )
        self.conv_bias = nnx.Param(jnp.zeros(layout.num_channels, dtype)) if c.conv_bias else None
        decay = jax.random.uniform(rngs.params(), (c.num_heads,), minval=1.0, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(decay))
        # dt starts log-uniform in [1e-3, 1e-1]; its bias is the inverse of softplus.
        dt = jnp.exp(
            jax.random.uniform(
                rngs.params(), (c.num_heads,), minval=math.log(1e-3), maxval=math.log(1e-1)
            )
        )
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))
        self.D = nnx.Param(jnp.ones(c.inner_size if c.d_per_channel else c.num_heads))
        self.norm_scale = nnx.Param(jnp.ones(c.inner_size, dtype)) if c.norm != "none" else None

    def __call__(
        self,
        u: Float[Array, "B T M"],
        cache: Mamba2Cache,
        valid: Bool[Array, "B T"],
        lengths: Lengths,
    ) -> tuple[Float[Array, "B T M"], Mamba2Cache]:
        """Runs a right-padded sequence from `cache`.

        Args:
            u: inputs.
            cache: what came before.
            valid: True on real positions, `t < lengths`; False on padding.
            lengths: how many positions are real.

        Returns:
            Outputs (anything at padded positions) and the cache after the last real position.
        """
        projected, layout = self._project(u), self.config.layout
        dt = layout.time_steps(projected, self.dt_bias[...])
        dt = jnp.where(valid[..., None], dt, 0.0)
        conv_input = jnp.where(valid[..., None], layout.conv_input(projected), 0)
        weights = self._weights()
        conv = causal_conv1d(conv_input, cache.conv, weights.conv_weight, weights.conv_bias)
        x, B, C = layout.heads(silu(conv))
        A, D = weights.A(), weights.skip(layout)
        y, state = ssd(
            *(x, dt, A, B, C, D, cache.ssm),
            chunk_size=self.config.chunk_size,
            implementation=self.implementation,
        )
        conv_state = conv_state_after(cache.conv, conv_input, lengths)
        # Of 512 rows XLA's norm is one launch, too, and by its cost model moves no more.
        y = self._gated_norm(y.reshape(*y.shape[:2], -1), projected, "xla")
        return self._project_out(y, projected), Mamba2Cache(state, conv_state)

    def tree(
        self,
        u: Float[Array, "B Q M"],
        tree: Tree,
        conv_gather_index: ConvGatherIndex,
        cache: Mamba2Cache,
        prefix_pending: Mamba2Pending | None = None,
        replay: Replay | None = None,
    ) -> tuple[Float[Array, "B Q M"] | Unscaled, Mamba2Pending, Mamba2Cache]:
        """Runs the last Q nodes of a tree from `cache`, after replaying a path, if any.

        Args:
            u: inputs of the query nodes.
            tree: all N nodes so far.
            conv_gather_index: by conv width K, the query rows of `conv_window(tree.parents, K)`.
            cache: what came before the root.
            prefix_pending: the pending record of the first `N - Q` nodes; None if `Q == N`.
            replay: of the previous tree: what advances `cache` first. The kernel reads and writes
                the state once for both.

        Returns:
            Outputs of the query nodes, whose rows are yet to be scaled if the norm is one that
            commutes with the output projection; the pending record of all N nodes; and the cache
            before the root.
        """
        c = self.config
        width = c.conv_width
        previous = None
        if replay is not None:
            previous = Previous(replay.pending, replay.path.mask, replay.conv_gather_index[width])
        norm_weight = self._commuting_norm()
        gated = norm_weight is not None or c.norm == "none"
        projected = self._project(u)
        y, pending, *states = mamba2_tree(
            projected,
            self._weights(),
            cache.ssm,
            cache.conv,
            conv_gather_index[width],
            tree.ancestor_mask,
            layout=c.layout,
            grown=prefix_pending,
            previous=previous,
            gated=gated,
            norm_weight=norm_weight,
            norm_epsilon=c.norm_eps,
            implementation=self.implementation,
        )
        output: Array | Unscaled
        if isinstance(y, Unscaled):
            output = dataclasses.replace(y, value=self._project_out(y.value, projected))
        else:
            if not gated:
                y = self._gated_norm(y, projected, self.implementation)
            output = self._project_out(y, projected)
        return output, pending, Mamba2Cache(*states)

    def replay(
        self,
        cache: Mamba2Cache,
        pending: Mamba2Pending,
        path: Path,
        conv_gather_index: ConvGatherIndex,
    ) -> Mamba2Cache:
        """The cache after the path.

        `conv_gather_index[K]` is `replay_window(path.parents, path.last, K)`.
        """
        ssm = replay(
            pending.x,
            pending.dt,
            self._weights().A(),
            pending.B,
            cache.ssm,
            path.mask,
            implementation=self.implementation,
        )
        window = conv_gather_index[self.config.conv_width]
        return Mamba2Cache(ssm, replay_conv_state(pending.conv_input, cache.conv, window))

    def _project(self, u: Array) -> Array:
        return self.in_proj(scaled(u, self.config.input_multiplier))

    def _weights(self) -> Mamba2Weights:
        bias = None if self.conv_bias is None else self.conv_bias[...]
        rest = (self.dt_bias[...], self.A_log[...], self.D[...])
        return Mamba2Weights(self.conv_weight[...], bias, *rest)

    def _commuting_norm(self) -> Array | None:
        """The weight of the gated norm, if its rows can as well be scaled after the projection."""
        c = self.config
        if self.norm_scale is None or c.norm != "gate_then_norm" or c.gate_groups > 1:
            return None
        # Of the output everything must be scaled.
        return None if c.mlp_dim or c.out_proj_bias else self.norm_scale[...]

    def _gated_norm(self, y: Array, projected: Array, implementation: str | None) -> Array:
        """Gate and norm of the scan's output `[B, T, H * P]`."""
        c = self.config
        gate, gate_start = c.layout.gate(projected)
        return gated_rms_norm(
            y,
            gate,
            None if self.norm_scale is None else self.norm_scale[...],
            norm=c.norm,
            epsilon=c.norm_eps,
            num_groups=1 if self.norm_scale is None else c.gate_groups,
            gate_start=gate_start,
            implementation=implementation,
        )

    def _project_out(self, y: Array, projected: Array) -> Array:
        """The output projection; of the gated branch, too, if there is one."""
        c = self.config
        if c.mlp_dim:
            branch_gate, branch, _ = split_last(projected, c.mlp_dim, c.mlp_dim)
            y = jnp.concatenate([silu(branch_gate) * branch, y], axis=-1)
        return scaled(self.out_proj(y), c.output_multiplier)
