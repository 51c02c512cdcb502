"""Kernels of a CPU step, in C and in plain torch."""
