"""Continuous batching: many requests through a few rows."""

from stree_jax.serving.scheduler import Scheduler
from stree_jax.serving.types import Completion, Request

__all__ = ["Completion", "Request", "Scheduler"]
