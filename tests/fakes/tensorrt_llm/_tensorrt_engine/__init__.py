"""The backend for prebuilt engines. Whether release 1.2.0 still has it could not be verified."""

from tensorrt_llm.llmapi import llm
from tensorrt_llm.llmapi.llm_configs import TrtLlmArgs


class LLM(llm.LLM):
    """The engine of the PyTorch backend, over a folder with the config of a prebuilt engine."""

    _args_class = TrtLlmArgs
