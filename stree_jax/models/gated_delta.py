"""The gated delta mixer: a linear attention that corrects its memory.

    b, z, v, k, q, a = in_proj(u);   v, k, q = silu(conv(v, k, q));   k, q = l2_norm(k), l2_norm(q)
    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
    state = exp(g) state;   w = beta (v - state k);   state = state + w (outer) k;   y = state q
    out_proj(norm(y) silu(z))

The model is Gated DeltaNet's (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), as Qwen3-Next
and Qwen3.5 have it. To the library it is a Mamba-2 layer whose columns have other names: v is x, k
is B, q is C and a is dt, so that `Mamba2Layout` and the convolution's op serve both. b stands
before z, and there is no skip D.

Kimi Delta Attention (KDA: Kimi Team 2025, arXiv:2510.26692) has a decay for each channel of a key:

    a, z, v, k, q, b = in_proj(u);   z has a sigmoid, and no silu
    g = -exp(A_log) softplus(a + dt_bias), or lower_bound sigmoid(exp(A_log) (a + dt_bias))

where a has as many numbers as all keys, and a and z may come from projections of low rank.

A pending record holds w, the corrections of the nodes, in the place of x, and of KDA g in the place
of dt. The corrections depend on the state that the tree was run from: a record advances the cache
that it was made from, and no other.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import (
    Decays,
    GatedNorm,
    Mamba2Layout,
    Mamba2Pending,
    StepSizes,
    delta_chunks,
    replay_conv_state,
    replay_delta,
    replay_tree_delta,
    tree_delta,
    tree_delta_layer,
)
from pallas_kernels.numerics import Product, rounded, total
from pallas_kernels.tree_conv1d.api import convolved_nodes
from stree_jax.array_types import Array, Float, Float32, Lengths
from stree_jax.checks import require, require_integer, require_integers
from stree_jax.mesh.partition import Cut
from stree_jax.models.layer import Nodes, Replay, mixer_cuts, register
from stree_jax.models.layers import (
    CONV_WIDTH_BITS,
    LayerInput,
    MixerModule,
    New,
    conv_state_after,
)
from stree_jax.models.mamba2 import Mamba2Cache, RecurrentConfig, convolution_of, convolved


@register("gated_delta")
@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig(RecurrentConfig):
    """A layer with one gated delta mixer.

    Attributes:
        num_heads: value heads `H`.
        head_dim: channels of a value head `P`.
        num_groups: key heads `G`; value head h uses key head `h // (H / G)`.
        state_size: channels of a key head `S`.
        conv_width: conv width `K`, at least 2.
        beta_scale: beta is this times a sigmoid; 2 allows negative eigenvalues (Olmo-Hybrid).
        by_channel: whether each channel of a key has a decay (KDA), or each head.
        gate_rank: with `by_channel`, the rank of the projections to a and z (Kimi); None: full.
        lower_bound: with `by_channel`, what g stays above (Ling); None: g has no bound.
        norm_eps: epsilon of the norm of each head's output.
        chunk_size: chunk length of the prefill scan; does not change results.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int = 4
    beta_scale: float = 1.0
    norm_eps: float = 1e-6
    chunk_size: int = 64
    by_channel: bool = False
    gate_rank: int | None = None
    lower_bound: float | None = None

    dtype_of_x = jnp.float32  # corrections enter the state as they are
    equal_sizes = ("num_heads",)
    shared_sizes = ("num_groups",)

    def __post_init__(self) -> None:
        require_integer(self, "conv_width", 2, bits=CONV_WIDTH_BITS)
        require_integers(self)
        require(
            self.num_heads % self.num_groups == 0,
            f"num_groups = {self.num_groups} does not divide num_heads = {self.num_heads}",
        )
        require(
            self.lower_bound is None or self.lower_bound < 0,
            f"lower_bound must be below 0, or None; got {self.lower_bound}",
        )
        require(
            self.by_channel or self.gate_rank is self.lower_bound is None,
            f"gate_rank = {self.gate_rank} and lower_bound = {self.lower_bound} need by_channel ="
            " True",
        )
        require(0 < self.beta_scale <= 2, f"beta_scale must be in (0, 2], got {self.beta_scale}")
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")

    @property
    def decay_size(self) -> int:
        """Decays of a token."""
        return self.num_heads * (self.state_size if self.by_channel else 1)

    @property
    def layout(self) -> Mamba2Layout:
        """Columns of the input projection: z, v, k and q in the places of Mamba-2's.

        Before them is b, and a is behind them; with `by_channel` a (and z, if both are of low rank)
        is before them, and b behind.
        """
        before = self.num_heads
        if self.by_channel:
            before = 2 * self.gate_rank if self.gate_rank else self.decay_size
        return Mamba2Layout(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_groups=self.num_groups,
            state_size=self.state_size,
            x_heads=self.num_heads,
            b_groups=self.num_groups,
            first_column=before,
            has_gate=self.gate_rank is None,
        )

    def build(self, d_model: int, **options: Any) -> "GatedDeltaMixer":
        return GatedDeltaMixer(self, d_model, **options)

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> Mamba2Pending:
        pending = super().init_pending(batch, num_nodes, dtype)
        decays = jnp.zeros((batch, num_nodes, self.decay_size), jnp.float32)
        return pending._replace(dt=self.by_head(decays))

    def by_head(self, decays: Float32[Array, "B N _"]) -> Float32[Array, "B N H ..."]:
        """Decays of heads, or of their channels."""
        if not self.by_channel:
            return decays
        return decays.reshape(*decays.shape[:2], self.num_heads, self.state_size)

    def cuts(self, shards: int) -> dict[str, Cut]:
        by_head, v = (self.num_heads, 1), (self.num_heads, self.head_dim)
        k = (self.num_groups, self.state_size)
        decays = (self.num_heads, self.state_size) if self.by_channel else by_head
        low = (1, self.gate_rank or 0)
        a, z = (low, low) if self.gate_rank else (decays, v)
        columns = (a, z, v, k, k, by_head)  # of b and a, or the other way round
        table = {"a_up.kernel": Cut(1, (decays,)), "z_up.kernel": Cut(1, (v,))}
        table |= {"A_log": Cut(0, (by_head,)), "dt_bias": Cut(0, (decays,))}
        return table | mixer_cuts(columns, (v,), (v, k, k))


class GatedDeltaMixer(MixerModule):
    """One gated delta mixer."""

    config: GatedDeltaConfig

    def make(self, d_model: int, new: New) -> None:
        c, layout = self.config, self.config.layout
        self.in_proj = new.linear(d_model, layout.num_columns, False)
        if c.gate_rank is not None:
            self.a_up = new.linear(c.gate_rank, c.decay_size, False)
            self.z_up = new.linear(c.gate_rank, c.num_heads * c.head_dim, False)
        self.out_proj = new.linear(c.num_heads * c.head_dim, d_model, False, new.out_scale)
        self.conv_weight, _ = new.conv(c.conv_width, layout.num_channels, False)
        self.A_log, self.dt_bias = new.rates(c.num_heads, c.decay_size)
        self.norm_scale = nnx.Param(jnp.ones(c.head_dim, jnp.float32))

    def __call__(
        self, u: Array, cache: Mamba2Cache, valid: Array, lengths: Lengths
    ) -> tuple[Product, Mamba2Cache]:
        projected = self.in_proj(u)
        (v, dt, k, conv_input), q = convolved(self, projected, self._step_bias(), cache.conv, valid)
        gates = self._gates(projected, self._recorded(projected, dt))
        arrays = q, k, v, *gates, cache.ssm, valid
        y, state = self.run(delta_chunks, *arrays, chunk_size=self.config.chunk_size)
        output = self._output(y, projected, self.norms_of_sequences())
        return output, Mamba2Cache(state, conv_state_after(cache.conv, conv_input, lengths))

    def tree(
        self, u: Float[Array, "B Q M"] | LayerInput, at: Nodes
    ) -> tuple[Product, Mamba2Pending, Mamba2Cache]:
        tree, _, cache, prefix_pending, replay = at
        c = self.config
        projected = self.in_proj.in_parts(u)
        convolution = convolution_of(self, projected, self._step_bias(), at)
        if not c.by_channel:
            one = self.run(
                tree_delta_layer,
                *(convolution, self.A_log[...], self._step_sizes(projected), cache.ssm),
                *(tree.ancestor_mask, replay and replay.path.mask),
            )
            if one is not None:
                y, pending, *states = one
                output = self._output(y, projected, self.implementation)
                return output, pending, Mamba2Cache(*states)
        # Of the nodes before, the convolution's op copies corrections in the dtype of v, and of KDA
        # a number a head, for nothing.
        prefix = prefix_pending and prefix_pending._replace(
            x=prefix_pending.x.astype(projected.dtype),
            dt=prefix_pending.dt[..., 0] if c.by_channel else prefix_pending.dt,
        )
        convolution = dataclasses.replace(convolution, prefix_pending=prefix)
        nodes, q, conv_state = convolved_nodes(convolution, self.implementation)
        new = slice(nodes.x.shape[1] - q.shape[1], None)  # behind the nodes before
        dt = self._recorded(projected, nodes.dt)
        if prefix_pending is not None and c.by_channel:
            dt = jnp.concatenate([prefix_pending.dt, dt], axis=1)
        arrays = (q, nodes.B, nodes.x[:, new], *self._gates(projected, dt), cache.ssm)
        mask = tree.ancestor_mask
        if replay is None:
            above = None if prefix_pending is None else prefix_pending.x
            y, w = self.run(tree_delta, *arrays, mask, prefix_u=above)
            state = cache.ssm
        else:
            old = replay.pending
            record = old.B, old.x, self._decays(old.dt), replay.path.mask
            y, w, state = self.run(replay_tree_delta, *record, *arrays, mask)
        output = self._output(y, projected, self.implementation)
        return output, nodes._replace(x=w, dt=dt), Mamba2Cache(state, conv_state)

    def replay(self, cache: Mamba2Cache, along: Replay) -> Mamba2Cache:
        w, dt, k, conv_input = along.pending
        state = self.run(replay_delta, k, w, self._decays(dt), cache.ssm, along.path.mask)
        window = along.conv_gather_index[self.config.conv_width]
        return Mamba2Cache(state, replay_conv_state(conv_input, cache.conv, window))

    def _step_bias(self) -> Float32[Array, " H"]:
        """What the convolution's op adds to its last columns, before a softplus."""
        if self.config.by_channel:  # which does nothing with them
            return jnp.zeros(self.config.num_heads, jnp.float32)
        return self.dt_bias[...]

    def _gates(self, projected: Product, dt: Array) -> tuple[Array | Decays, StepSizes]:
        """Logarithms of decays, and how much of the error each token corrects."""
        return self._decays(dt), self._step_sizes(projected)

    def _step_sizes(self, projected: Product) -> StepSizes:
        c = self.config
        first_beta = c.layout.columns[4] if c.by_channel else 0
        return StepSizes(projected, first_beta, c.num_heads, c.beta_scale)

    def _decays(self, dt: Array) -> Array | Decays:
        """Logarithms of the decays of a record."""
        return dt if self.config.by_channel else Decays(dt, self.A_log[...])

    def _recorded(self, projected: Product, dt: Array) -> Float32[Array, "B T H ..."]:
        """What a record holds of decays: time steps of heads, or logarithms of channels."""
        c = self.config
        if not c.by_channel:
            return dt
        a = total(projected)[..., : c.gate_rank or c.decay_size]
        a = a if c.gate_rank is None else self.a_up(a)
        a = c.by_head(a.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None, None])
        rates = jnp.exp(self.A_log[...].astype(jnp.float32))[None, None, :, None]
        if c.lower_bound is None:
            return rounded(-rates * jax.nn.softplus(a))
        return rounded(c.lower_bound * jax.nn.sigmoid(rounded(rates * a)))

    def _output(self, y: Array, projected: Product, implementation: str | None) -> Product:
        """Norm of each head, gate and output projection of `[B, T, H, P]`."""
        c, rank = self.config, self.config.gate_rank
        gate, start = c.layout.gate(projected)
        if rank is not None:
            gate, start = self.z_up(total(projected)[..., rank : 2 * rank]), 0
        rows = GatedNorm(
            y.reshape(*y.shape[:2], -1),
            gate,
            self.norm_scale[...],
            norm="norm_then_gate",
            epsilon=c.norm_eps,
            num_groups=c.num_heads,
            gate_start=start,
            activation="sigmoid" if c.by_channel else "silu",
            implementation=implementation,
        )
        return self.row_parallel(rows)
