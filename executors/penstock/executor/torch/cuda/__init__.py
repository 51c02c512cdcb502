"""The fused path for CUDA devices: a decoder step with few kernel launches."""
