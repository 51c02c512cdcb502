"""The fused step of the embedded executor on a CPU."""
