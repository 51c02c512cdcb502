"""The optional parts of a request besides its tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(slots=True)
class LoRARequest:
    """An adapter by name, number and path. The path must exist at construction."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: Literal["hf", "nemo"] = "hf"

    def __post_init__(self) -> None:
        if not self.lora_path or not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(
                f"lora_ckpt_source must be 'hf' or 'nemo', got {self.lora_ckpt_source}"
            )


@dataclass(slots=True)
class GenerationRequest:
    """The item that `submit` puts into the engine's queue. The queue's owner sets `id`."""

    prompt_token_ids: list[int]
    sampling_params: Any
    streaming: bool
    lora_request: LoRARequest | None = None
    kv_cache_retention_config: Any = None
    trace_headers: Any = None
    cache_salt: str | None = None
    priority: float | None = None
    id: int = 0
