"""A stand-in for TensorRT-LLM 1.2, PyTorch backend, for tests: no GPU, no network, no weights.

Owns an engine in miniature behind the package's real names: in-flight batching on a separate
thread, a page pool with reuse, samplers, statistics, and the hazards that callers must live with.
Names, defaults and fields are held against the facts in `penstock.executor.trtllm`. What tests
steer it by is in `tensorrt_llm.fake_control`, which the real package does not have.
"""

from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.sampling_params import SamplingParams

__version__ = "1.2.0"
__all__ = ["LLM", "SamplingParams", "__version__"]
