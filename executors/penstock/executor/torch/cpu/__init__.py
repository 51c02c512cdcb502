"""The fused path on a CPU: a decoder step with joined weights and few kernel calls."""
