"""Where Triton kernels run in tests: on the GPU, or interpreted without one; see conftest."""

from __future__ import annotations

import os

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
