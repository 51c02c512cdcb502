"""`LLM` of the TensorRT backend: the same engine, from a folder with a prebuilt engine's config."""

from __future__ import annotations

from tensorrt_llm.llmapi import llm
from tensorrt_llm.llmapi.llm_args import TrtLlmArgs


class LLM(llm.LLM):
    """Accepts the arguments of TrtLlmArgs."""

    _args_class = TrtLlmArgs
    _foreign_keys = frozenset()
