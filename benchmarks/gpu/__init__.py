"""Sections of `benchmarks.gpu_session` and their runner."""
