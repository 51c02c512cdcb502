"""Where the real package keeps `LoraConfig`."""

from tensorrt_llm.llmapi.llm_configs import LoraConfig

__all__ = ["LoraConfig"]
