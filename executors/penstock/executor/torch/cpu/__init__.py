"""The embedded executor on a CPU: kernels in C and the same in plain torch."""
