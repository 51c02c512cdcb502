"""The fused path for CUDA devices: a decoder step in few launches of our own kernels."""
