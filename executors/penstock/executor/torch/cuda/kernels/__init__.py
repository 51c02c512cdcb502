"""The Triton kernels of the fused step; imported only if a CUDA device runs them."""
