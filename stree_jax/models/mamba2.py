"""The Mamba-2 mixer of every family: one class, the differences are knobs of `Mamba2Config`.

    z, x, B, C, dt = in_proj(u)
    x, B, C = silu(conv(x, B, C));   dt = clip(softplus(dt + dt_bias))
    state = exp(dt A) state + dt x (outer) B;   y = state C + D x
    out_proj(gated_norm(y, z))

The same algebra runs over a sequence (`__call__`) and over a tree (`tree`), and both read it from
the same three methods, so that a clamp or a multiplier cannot differ between prefill and decode.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import (
    gated_rms_norm,
    replay,
    replay_conv_state,
    replay_tree_scan,
    ssd,
    tree_conv1d,
    tree_scan,
)
from stree_jax.array_types import Array, Bool, Float, Lengths
from stree_jax.layer_config import Mamba2Config
from stree_jax.models.cache import Mamba2Cache, Mamba2Pending, Path, Replay, Windows
from stree_jax.models.layers import (
    causal_conv1d,
    conv_state_after,
    linear,
    scaled,
    silu,
    split_last,
)
from stree_jax.tree import Tree


class Projected(NamedTuple):
    """What the input projection gives at each position."""

    gate: Array  # z [B, T, H * P]
    conv_input: Array  # x, B, C before the convolution [B, T, C]
    dt: Array  # after softplus and clamp [B, T, H] float32
    branch: Array | None  # output of the gated branch beside the SSM [B, T, mlp_dim]


class Mamba2Mixer(nnx.Module):
    """One Mamba-2 mixer.

    Args:
        config: its shape and knobs.
        d_model: width of input and output.
        dtype: of the weights; `A_log`, `D` and `dt_bias` are float32 whatever it is.
        rngs: for initialisation, which follows the published models.
        out_scale: scales the initial output projection, for deep stacks.
        implementation: of the tree kernels, see `pallas_kernels.dispatch`.
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
        # Of the ops that jax-triton does not have.
        self._common = None if implementation == "jax_triton" else implementation
        self.in_proj = linear(
            d_model,
            2 * c.mlp_dim + sum(c.projected_sizes),
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
                rngs.params(), (c.conv_width, c.conv_channels), dtype, minval=-bound, maxval=bound
            )
        )
        self.conv_bias = nnx.Param(jnp.zeros(c.conv_channels, dtype)) if c.conv_bias else None
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
        mask: Bool[Array, "B T"],
        lengths: Lengths,
    ) -> tuple[Float[Array, "B T M"], Mamba2Cache]:
        """Runs a right-padded sequence from `cache`.

        Args:
            u: inputs.
            cache: what came before.
            mask: True on real positions, `t < lengths`.
            lengths: how many positions are real.

        Returns:
            Outputs (anything at padded positions) and the cache after the last real position.
        """
        projected = self._project(u)
        dt = jnp.where(mask[..., None], projected.dt, 0.0)
        conv_input = jnp.where(mask[..., None], projected.conv_input, 0)
        conv = causal_conv1d(conv_input, cache.conv, self.conv_weight[...], self._conv_bias())
        x, B, C = self._split(silu(conv))
        y, state = ssd(
            x, dt, self._A(), B, C, self._D(), cache.ssm, chunk_size=self.config.chunk_size
        )
        conv_state = conv_state_after(cache.conv, conv_input, lengths)
        # Sequences are trained on, and the kernel has no gradient.
        return self._finish(y, projected, "xla"), Mamba2Cache(state, conv_state)

    def tree(
        self,
        u: Float[Array, "B Q M"],
        tree: Tree,
        windows: Windows,
        cache: Mamba2Cache,
        grown: Mamba2Pending | None = None,
        replay: Replay | None = None,
    ) -> tuple[Float[Array, "B Q M"], Mamba2Pending, Mamba2Cache]:
        """Runs the last Q nodes of a tree from `cache`, after replaying a path, if any.

        Args:
            u: inputs of the query nodes.
            tree: all N nodes so far.
            windows: for each conv width K the query rows of `conv_window(tree.parents, K)`.
            cache: what came before the root.
            grown: the pending record of the first `N - Q` nodes; None if `Q == N`.
            replay: of the previous tree: what advances `cache` first. The kernel reads and writes
                the state once for both.

        Returns:
            Outputs of the query nodes, the pending record of all N nodes, and the cache before the
            root.
        """
        if replay is not None and self.implementation == "jax_triton":  # it has no fused kernel
            cache, replay = self.replay(cache, *replay), None
        conv_state = cache.conv
        if replay is not None:
            back = replay.windows[self.config.conv_width]
            conv_state = replay_conv_state(replay.pending.conv_input, conv_state, back)
        projected = self._project(u)
        conv_input = projected.conv_input
        if grown is not None:
            conv_input = jnp.concatenate([grown.conv_input, conv_input], axis=1)
        window = windows[self.config.conv_width]
        conv = tree_conv1d(
            conv_input,
            conv_state,
            self.conv_weight[...],
            self._conv_bias(),
            window,
            activation="silu",
            implementation=self._common,
        )
        x, B, C = self._split(conv)
        pending = Mamba2Pending(x, projected.dt, B, projected.conv_input)
        if grown is not None:
            pending = jax.tree.map(lambda *v: jnp.concatenate(v, axis=1), grown, pending)
        new = (pending.x, pending.dt, self._A(), pending.B, C, self._D())
        if replay is None:
            state = cache.ssm
            y = tree_scan(*new, state, tree.ancestor_mask, implementation=self.implementation)
        else:
            old = replay.pending
            y, state = replay_tree_scan(
                old.x,
                old.dt,
                old.B,
                replay.path.mask,
                *new,
                cache.ssm,
                tree.ancestor_mask,
                implementation=self.implementation,
            )
        out = self._finish(y, projected, self._common)
        return out, pending, Mamba2Cache(state, conv_state)

    def replay(
        self, cache: Mamba2Cache, pending: Mamba2Pending, path: Path, windows: Windows
    ) -> Mamba2Cache:
        """The cache after the path; `windows[K]` is `replay_window(path.parents, path.last, K)`."""
        ssm = replay(
            pending.x,
            pending.dt,
            self._A(),
            pending.B,
            cache.ssm,
            path.mask,
            implementation=self.implementation,
        )
        window = windows[self.config.conv_width]
        return Mamba2Cache(ssm, replay_conv_state(pending.conv_input, cache.conv, window))

    def _project(self, u: Array) -> Projected:
        c = self.config
        zxbcdt = self.in_proj(scaled(u, c.input_multiplier))
        branch = None
        if c.mlp_dim:
            branch_gate, branch, zxbcdt = split_last(zxbcdt, c.mlp_dim, c.mlp_dim)
            branch = silu(branch_gate) * branch
        gate, x, B, C, dt = (
            scaled(part, multiplier)
            for part, multiplier in zip(
                split_last(zxbcdt, *c.projected_sizes[:-1]), c.section_multipliers, strict=True
            )
        )
        if c.repeat_before_conv:
            x, B = (
                self._repeat(x, c.head_dim, c.num_heads),
                self._repeat(B, c.state_size, c.num_groups),
            )
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...])
        dt = jnp.clip(dt, *c.dt_limit)
        return Projected(gate, jnp.concatenate([x, B, C], axis=-1), dt, branch)

    def _split(self, conv: Array) -> tuple[Array, Array, Array]:
        """Takes x `[B, T, H, P]`, B and C `[B, T, G, S]` from the activated convolution."""
        c = self.config
        x_heads, b_groups = c.conv_heads
        x, B, C = split_last(conv, x_heads * c.head_dim, b_groups * c.state_size)
        x, B = self._repeat(x, c.head_dim, c.num_heads), self._repeat(B, c.state_size, c.num_groups)
        rows = conv.shape[:-1]
        return (
            x.reshape(*rows, c.num_heads, c.head_dim),
            B.reshape(*rows, c.num_groups, c.state_size),
            C.reshape(*rows, c.num_groups, c.state_size),
        )

    def _repeat(self, x: Array, size: int, count: int) -> Array:
        """Repeats each head of width `size`, so that there are `count`."""
        heads = x.reshape(*x.shape[:-1], -1, size)
        if heads.shape[-2] == count:
            return x
        return jnp.repeat(heads, count // heads.shape[-2], axis=-2).reshape(*x.shape[:-1], -1)

    def _finish(self, y: Array, projected: Projected, implementation: str | None) -> Array:
        """Gate, norm and output projection of the scan's output `[B, T, H, P]`."""
        c = self.config
        y = gated_rms_norm(
            y.reshape(*y.shape[:2], -1),
            projected.gate,
            None if self.norm_scale is None else self.norm_scale[...],
            norm=c.norm,
            epsilon=c.norm_eps,
            num_groups=1 if self.norm_scale is None else c.gate_groups,
            implementation=implementation,
        )
        if projected.branch is not None:
            y = jnp.concatenate([projected.branch, y], axis=-1)
        return scaled(self.out_proj(y), c.output_multiplier)

    def _conv_bias(self) -> Array | None:
        return None if self.conv_bias is None else self.conv_bias[...]

    def _A(self) -> Array:
        return -jnp.exp(self.A_log[...].astype(jnp.float32))

    def _D(self) -> Array:
        c = self.config
        per_channel = self.D[...].astype(jnp.float32).reshape(c.num_heads, -1)
        return jnp.broadcast_to(per_channel, (c.num_heads, c.head_dim))
