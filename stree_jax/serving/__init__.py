"""Continuous batching: many requests through a few rows."""

from stree_jax.serving.prefix_cache import PrefixCacheStats
from stree_jax.serving.scheduler import Scheduler
from stree_jax.serving.types import Completion, Event, Request

__all__ = ["Completion", "Event", "PrefixCacheStats", "Request", "Scheduler"]
