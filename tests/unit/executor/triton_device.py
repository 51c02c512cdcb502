"""The device of Triton kernels in tests: the GPU, or the interpreter without one; see conftest."""

from __future__ import annotations

import os

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
