"""Multi-token-prediction heads in Nemotron-3 checkpoints."""

from stree_jax.convert.rules import TRANSPOSED, Rule
from stree_jax.convert.tables import hf_attention, nemotron_experts, within
from stree_jax.layer_config import MoeConfig
from stree_jax.models.mtp import MtpConfig


def mtp_rules(config: MtpConfig, prefix: str = "mtp") -> list[Rule]:
    """The tensors of a head of the pattern attention, experts, by the names of `MtpHead`."""
    assert isinstance(config.feed_forward, MoeConfig)
    first, last = f"{prefix}.layers.0", f"{prefix}.layers.1"
    experts = nemotron_experts(config.feed_forward, merged=False)
    return [
        Rule(f"{first}.enorm.weight", "embedding_norm_scale"),
        Rule(f"{first}.hnorm.weight", "hidden_norm_scale"),
        Rule(f"{first}.eh_proj.weight", "in_proj.kernel", TRANSPOSED),
        Rule(f"{first}.norm.weight", "attention_norm_scale"),
        *within(hf_attention(config.attention), f"{first}.mixer", "attention"),
        Rule(f"{last}.norm.weight", "feed_forward_norm_scale"),
        *within(experts, f"{last}.mixer", "feed_forward"),
        Rule(f"{last}.final_layernorm.weight", "final_norm_scale"),
    ]
