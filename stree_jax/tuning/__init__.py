"""Choosing the draft tree by measurement of acceptance and of step costs on this device."""

from stree_jax.tuning.dynamic import SHARPNESS, dynamic_tau, fitted
from stree_jax.tuning.search import acceptance, best_trees, replay_tau
from stree_jax.tuning.trace import (
    RankTrace,
    head_trace,
    rank_trace,
    ranks_by_depth,
    trace_by_depth,
)
from stree_jax.tuning.tuner import Candidate, TuningReport, tune

__all__ = [
    "SHARPNESS",
    "Candidate",
    "RankTrace",
    "TuningReport",
    "acceptance",
    "best_trees",
    "dynamic_tau",
    "fitted",
    "head_trace",
    "rank_trace",
    "ranks_by_depth",
    "replay_tau",
    "trace_by_depth",
    "tune",
]
