"""Continuous batching: many requests through a few rows."""

from stree_jax.serving.scheduler import Completion, Request, Scheduler

__all__ = ["Completion", "Request", "Scheduler"]
