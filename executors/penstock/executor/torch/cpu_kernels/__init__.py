"""Kernels of a CPU step: compiled C, and a reference in PyTorch."""
