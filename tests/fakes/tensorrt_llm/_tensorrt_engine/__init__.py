"""The backend for prebuilt engines; whether 1.2.0 still has it could not be verified."""

from tensorrt_llm.llmapi import llm
from tensorrt_llm.llmapi.llm_configs import TrtLlmArgs


class LLM(llm.LLM):
    """The same engine, from a folder with a prebuilt engine's config."""

    _args_class = TrtLlmArgs
