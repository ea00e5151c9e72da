"""Depthwise causal convolution along the paths of a tree; alone, or with a Mamba-2 layer's rest."""
