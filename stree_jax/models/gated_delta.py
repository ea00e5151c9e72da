"""The gated delta mixer of Qwen3-Next and Qwen3.5: a linear attention that corrects its memory.

    b, z, v, k, q, a = in_proj(u);   v, k, q = silu(conv(v, k, q));   k, q = l2_norm(k), l2_norm(q)
    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
    state = exp(g) state;   w = beta (v - state k);   state = state + w (outer) k;   y = state q
    out_proj(norm(y) silu(z))

The model is Gated DeltaNet's (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464). To the library
it is a Mamba-2 layer whose columns have other names: v is x, k is B, q is C and a is dt, so that
`Mamba2Layout` and the convolution's op serve both. b stands before z, and there is no skip D.

A pending record holds w, the corrections of the nodes, in the place of x, and g in that of dt. The
corrections depend on the state that the tree was run from: a record advances the cache that it was
made from, and no other.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import (
    Mamba2Layout,
    Mamba2Pending,
    delta_chunks,
    gated_rms_norm,
    replay_conv_state,
    replay_delta,
    replay_tree_delta,
    tree_conv1d_layer,
    tree_delta,
)
from pallas_kernels.numerics import Product, total
from stree_jax.array_types import Array, Float, Float32, Lengths
from stree_jax.checks import require, require_integer
from stree_jax.mesh.partition import Cut
from stree_jax.models.layer import Nodes, Replay, mixer_cuts, register
from stree_jax.models.layers import CONV_WIDTH_BITS, MixerModule, New, conv_state_after
from stree_jax.models.mamba2 import Mamba2Cache, RecurrentConfig, convolved


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

    dtype_of_x: ClassVar[DTypeLike | None] = jnp.float32  # corrections enter the state as they are
    equal_sizes: ClassVar[tuple[str, ...]] = ("num_heads",)
    shared_sizes: ClassVar[tuple[str, ...]] = ("num_groups",)

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "num_groups", "state_size", "chunk_size"):
            require_integer(self, name, 1)
        require_integer(self, "conv_width", 2, bits=CONV_WIDTH_BITS)
        require(
            self.num_heads % self.num_groups == 0,
            f"num_groups = {self.num_groups} does not divide num_heads = {self.num_heads}",
        )
        require(0 < self.beta_scale <= 2, f"beta_scale must be in (0, 2], got {self.beta_scale}")
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")

    @property
    def layout(self) -> Mamba2Layout:
        """Columns of the input projection: b, then z, v, k, q and a in the places of Mamba-2's."""
        return Mamba2Layout(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_groups=self.num_groups,
            state_size=self.state_size,
            x_heads=self.num_heads,
            b_groups=self.num_groups,
            first_column=self.num_heads,
        )

    def build(self, d_model: int, **options: Any) -> "GatedDeltaMixer":
        return GatedDeltaMixer(self, d_model, **options)

    def cuts(self, shards: int) -> dict[str, Cut]:
        by_head, v = (self.num_heads, 1), (self.num_heads, self.head_dim)
        k = (self.num_groups, self.state_size)
        heads = Cut(0, (by_head,))
        table = mixer_cuts((by_head, v, v, k, k, by_head), (v,), (v, k, k))
        return table | {"A_log": heads, "dt_bias": heads}


class DeltaMixer(MixerModule):
    """A mixer with a delta rule, whose gates a subclass computes."""

    config: Any  # a `RecurrentConfig` with `norm_eps` and `chunk_size`
    norm_scale: nnx.Param
    activation: ClassVar[str]  # of the output's gate

    def step_bias(self) -> Float32[Array, " H"]:
        """What the convolution's op adds to the columns of dt, before softplus."""
        raise NotImplementedError

    def gates(self, projected: Array, dt: Float32[Array, "B T H"]) -> tuple[Array, Array]:
        """Logarithms of decays g and strengths of corrections beta, float32."""
        raise NotImplementedError

    def output_gate(self, projected: Array) -> tuple[Array, int]:
        """An array with the gates of the output, and their first column."""
        return self.config.layout.gate(projected)

    def __call__(
        self, u: Array, cache: Mamba2Cache, valid: Array, lengths: Lengths
    ) -> tuple[Product, Mamba2Cache]:
        projected = self.in_proj(u)
        (v, dt, k, conv_input), q = convolved(self, projected, self.step_bias(), cache.conv, valid)
        arrays = q, k, v, *self.gates(projected, dt), cache.ssm, valid
        y, state = self.run(delta_chunks, *arrays, chunk_size=self.config.chunk_size)
        output = self._output(y, projected, self.norms_of_sequences())
        return output, Mamba2Cache(state, conv_state_after(cache.conv, conv_input, lengths))

    def tree(
        self, u: Float[Array, "B Q M"], at: Nodes
    ) -> tuple[Product, Mamba2Pending, Mamba2Cache]:
        tree, conv_gather_index, cache, prefix_pending, replay = at
        c, width = self.config, self.config.conv_width
        projected = self.in_proj.in_parts(u)
        previous = replay and (replay.pending, replay.conv_gather_index[width])
        # Of the nodes before, the convolution's op copies corrections in the dtype of v, and a
        # number a head, for nothing.
        prefix = prefix_pending and prefix_pending._replace(
            x=prefix_pending.x.astype(u.dtype), dt=jnp.zeros(prefix_pending.dt.shape[:3])
        )
        nodes, q, conv_state = self.run(
            tree_conv1d_layer,
            projected,
            *self.conv(),
            self.step_bias(),
            cache.conv,
            conv_gather_index[width],
            layout=c.layout,
            prefix_pending=prefix,
            previous=previous,
        )
        new = slice(nodes.x.shape[1] - u.shape[1], None)  # behind the nodes before
        g, beta = self.gates(projected, nodes.dt[:, new])
        if prefix_pending is not None:
            g = jnp.concatenate([prefix_pending.dt, g], axis=1)
        arrays = (q, nodes.B, nodes.x[:, new], g, beta, cache.ssm)
        mask = tree.ancestor_mask
        if replay is None:
            above = None if prefix_pending is None else prefix_pending.x
            y, w = self.run(tree_delta, *arrays, mask, prefix_u=above)
            state = cache.ssm
        else:
            old = replay.pending
            record = old.B, old.x, old.dt, replay.path.mask
            y, w, state = self.run(replay_tree_delta, *record, *arrays, mask)
        output = self._output(y, projected, self.implementation)
        return output, nodes._replace(x=w, dt=g), Mamba2Cache(state, conv_state)

    def replay(self, cache: Mamba2Cache, along: Replay) -> Mamba2Cache:
        w, g, k, conv_input = along.pending
        state = self.run(replay_delta, k, w, g, cache.ssm, along.path.mask)
        window = along.conv_gather_index[self.config.conv_width]
        return Mamba2Cache(state, replay_conv_state(conv_input, cache.conv, window))

    def _output(self, y: Array, projected: Product, implementation: str | None) -> Product:
        """Norm of each head, gate and output projection of `[B, T, H, P]`."""
        c, (gate, start) = self.config, self.output_gate(projected)
        heads = y.shape[2]
        rows = gated_rms_norm(
            y.reshape(*y.shape[:2], -1),
            gate,
            jnp.tile(self.norm_scale[...], heads),
            norm="norm_then_gate",
            epsilon=c.norm_eps,
            num_groups=heads,
            gate_start=start,
            activation=self.activation,
            implementation=implementation,
        )
        return self.row_parallel(rows)


class GatedDeltaMixer(DeltaMixer):
    """One gated delta mixer."""

    config: GatedDeltaConfig
    activation = "silu"

    def make(self, d_model: int, new: New) -> None:
        c, layout = self.config, self.config.layout
        self.in_proj = new.linear(d_model, layout.num_columns, False)
        self.out_proj = new.linear(c.num_heads * c.head_dim, d_model, False, new.out_scale)
        self.conv_weight, _ = new.conv(c.conv_width, layout.num_channels, False)
        self.A_log, self.dt_bias = new.rates(c.num_heads)
        self.norm_scale = nnx.Param(jnp.ones(c.head_dim, jnp.float32))

    def step_bias(self) -> Float32[Array, " H"]:
        return self.dt_bias[...]

    def gates(self, projected: Array, dt: Float32[Array, "B T H"]) -> tuple[Array, Array]:
        c = self.config
        logits = projected[..., : c.num_heads].astype(jnp.float32)
        rates = jnp.exp(self.A_log[...].astype(jnp.float32))
        return -rates[None, None] * dt, c.beta_scale * jax.nn.sigmoid(logits)
