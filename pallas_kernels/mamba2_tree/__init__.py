"""All of a Mamba-2 layer that is between its two projections."""
