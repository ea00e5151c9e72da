"""Where the kernels find the parts of a layer's input projection."""

from pallas_kernels import AttentionLayout
from stree_jax.layer_config import AttentionConfig


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
