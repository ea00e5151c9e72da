"""Drafters, verifiers and the one loop that runs them."""
