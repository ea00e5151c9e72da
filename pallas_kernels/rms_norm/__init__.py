"""Root-mean-square norms: between two layers, and behind the scan of a Mamba-2 layer."""
