"""Tells the modules of a model that it is one shard of several."""

from typing import Any

from stree_jax.config import ModelConfig
from stree_jax.models.attention import AttentionMixer
from stree_jax.models.mamba2 import Mamba2Mixer
from stree_jax.models.mlp import Mlp
from stree_jax.models.moe import MixtureOfExperts
from stree_jax.models.parallel import ParallelMixer
from stree_jax.models.shared import SharedLayer, SharedTransformer
from stree_jax.partition import Shard, spans_shards


def set_shard(module: Any, shard: Shard, config: ModelConfig) -> None:
    """Makes a mixer or a shared block add up its outputs over the shards.

    Args:
        module: a module built from the local config.
        shard: the same object for the whole model.
        config: the whole model's config, which decides what a norm spans.
    """
    match module:
        case Mamba2Mixer():
            assert config.mamba2 is not None
            module.shard, module.norm_spans_shards = shard, spans_shards(config.mamba2)
        case AttentionMixer() | Mlp() | MixtureOfExperts():
            # The expert that all tokens use is in the sum of the mixture.
            module.shard = shard
        case ParallelMixer():
            set_shard(module.mamba2, shard, config)
            set_shard(module.attention, shard, config)
        case SharedTransformer():
            set_shard(module.attention, shard, config)
            set_shard(module.mlp, shard, config)
        case SharedLayer():
            pass  # adapters and the last projection stay whole, or are cut at their outputs
        case _:
            raise AssertionError(module)
