"""The backend for engines built ahead; whether 1.2.0 still ships it could not be verified."""

from tensorrt_llm._tensorrt_engine.llm import LLM

__all__ = ["LLM"]
