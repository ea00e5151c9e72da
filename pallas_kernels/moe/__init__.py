"""The chosen experts of each token in a mixture of experts."""
