"""Kernels of a CPU step: in C, and the same in plain torch."""
