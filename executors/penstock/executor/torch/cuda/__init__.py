"""The fused path: a decoder's step in few launches of our own kernels, for CUDA devices."""
