"""The device on which tests run Triton kernels: the GPU, or the CPU if there is none. On the CPU
the kernels run in Triton's interpreter, which conftest enables.
"""

from __future__ import annotations

import os

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
