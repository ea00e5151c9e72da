"""How long decoding takes here, and its parts: one clock, one table of methods."""

from stree_jax.measuring.bench import BenchReport, bench
from stree_jax.measuring.costs import Costs, measure_costs
from stree_jax.measuring.questions import Question
from stree_jax.measuring.record import Record

__all__ = ["BenchReport", "Costs", "Question", "Record", "bench", "measure_costs"]
