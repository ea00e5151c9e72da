"""Counterparts of the tables and figures of STree (Wu et al., 2025, arXiv:2505.14969)."""
