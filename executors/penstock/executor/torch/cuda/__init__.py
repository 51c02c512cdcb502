"""The fused path for CUDA devices: a decoder's step in few launches of our own kernels."""
