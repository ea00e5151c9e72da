"""Sections of `benchmarks.gpu_session`, their runner, and the search of `benchmarks.tune`."""
