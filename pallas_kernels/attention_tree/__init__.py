"""All of an attention layer over a tree that is between its projections."""
