"""The gate and the norm behind the scan of a Mamba-2 layer."""
