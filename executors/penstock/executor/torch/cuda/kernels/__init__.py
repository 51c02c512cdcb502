"""The Triton kernels of the fused step; imported where a CUDA device runs them and nowhere else."""
