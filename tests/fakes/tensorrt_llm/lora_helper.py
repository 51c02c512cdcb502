"""`LoraConfig`, in the module where the real package has it."""

from tensorrt_llm.llmapi.llm_configs import LoraConfig as LoraConfig
