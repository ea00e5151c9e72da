"""Root-mean-square norms: between two layers, and after the scan of a Mamba-2 layer."""
