"""Choosing the draft tree by measurement of acceptance and of step costs on this device."""

from stree_jax.tuning.trace import RankTrace, rank_trace
from stree_jax.tuning.tuner import Candidate, TuningReport, tune

__all__ = ["Candidate", "RankTrace", "TuningReport", "rank_trace", "tune"]
