"""Where kernels find the parts of a layer's input projection."""

from pallas_kernels import AttentionLayout, Mamba2Layout
from stree_jax.layer_config import AttentionConfig, Mamba2Config


def mamba2_layout(config: Mamba2Config) -> Mamba2Layout:
    """Columns of z, x, B, C and dt, and how the heads share them."""
    return Mamba2Layout(
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_groups=config.num_groups,
        state_size=config.state_size,
        x_heads=config.x_heads,
        b_groups=config.b_groups,
        repeat_before_conv=config.repeat_before_conv,
        first_column=2 * config.mlp_dim,
        multipliers=config.section_multipliers,
        dt_limit=config.dt_limit,
    )


def attention_layout(config: AttentionConfig) -> AttentionLayout:
    """Columns of q, k and v, and how queries and keys are rotated."""
    return AttentionLayout(
        num_heads=config.num_heads,
        num_groups=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.score_scale,
        frequencies=config.rotary_frequencies,
        key_multiplier=config.key_multiplier,
    )
