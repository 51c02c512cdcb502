"""The Triton kernels of the fused step; imported only where a CUDA device runs them."""
