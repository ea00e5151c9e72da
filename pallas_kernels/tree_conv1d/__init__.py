"""Depthwise causal convolution along the paths of a tree."""
