"""Multi-token-prediction heads of Qwen3-Next and Qwen3.5 checkpoints: one more attention layer."""

import functools
from collections.abc import Mapping
from typing import Any

from stree_jax import ModelConfig
from stree_jax.convert import (
    PLUS_ONE,
    Fields,
    HeadDescription,
    Rule,
    qwen_layer_rules,
)
from stree_jax.extensions.mtp.conversion import described, layer_rules
from stree_jax.extensions.mtp.head import MtpConfig

PREFIX = "mtp."
_MERGED = f"{PREFIX}layers.0.mlp.experts.gate_up_proj"
_OUTSIDE = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
_NUMBER, _DEDICATED = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"


def read(
    fields: Fields, tensors: Mapping[str, Any], config: ModelConfig, *, merged: bool
) -> HeadDescription | None:
    """Describes the head of a checkpoint, whose layers are like the target's last ones."""
    fields.ignore("of the multi-token prediction head, see load_mtp", _NUMBER, _DEDICATED)
    head_tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}

    def config_and_rules() -> tuple[MtpConfig, list[Rule]]:
        fields.check(
            fields.values.get(_DEDICATED) in (None, False),
            f"{_DEDICATED} = true: heads with an embedding of their own are not supported",
        )
        attention, last = config.attention, config.layers[-1]
        fields.check(attention is not None, "no attention layer says how the head's is made")
        assert attention is not None
        head = MtpConfig(config.d_model, attention, last, config.norm_eps, norm_float32=True)
        in_one = _MERGED in head_tensors if head_tensors else merged
        rules_of = functools.partial(qwen_layer_rules, by_group=False, merged=in_one)
        return head, layer_rules(head, f"{PREFIX}layers.0", _OUTSIDE, rules_of, PLUS_ONE)

    number = fields.values.get(_NUMBER, int(bool(head_tensors)))  # Qwen3-Next does not say it
    return described(fields, tensors, head_tensors, _NUMBER, number, config_and_rules)
