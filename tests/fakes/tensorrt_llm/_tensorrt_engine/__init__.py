"""The backend for prebuilt engines; whether 1.2.0 still has it could not be verified."""

from tensorrt_llm._tensorrt_engine.llm import LLM

__all__ = ["LLM"]
