"""A stand-in for TensorRT-LLM 1.2, PyTorch backend, for tests: no GPU, no network, no weights.

It contains a small engine behind the package's real names: in-flight batching on a separate thread,
a page pool with reuse, samplers, statistics, and the hazards that callers must handle. Tests
compare names, defaults and fields with the facts in `penstock.executor.trtllm`, and control the
engine through `tensorrt_llm.fake_control`, which the real package does not have.
"""

from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.sampling_params import SamplingParams

__version__ = "1.2.0"
__all__ = ["LLM", "SamplingParams", "__version__"]
