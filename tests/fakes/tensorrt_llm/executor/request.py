"""A submitted request, and the errors of a request and of the engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorrt_llm.recorded import recorded


class RequestError(RuntimeError):
    """One request failed; the engine continues."""


class CppExecutorError(RuntimeError):
    """The engine itself failed."""


def _check_path(adapter: Any) -> None:
    if not adapter.lora_path or not Path(adapter.lora_path).exists():
        raise ValueError(f"lora_path ({adapter.lora_path}) does not exist.")


LoRARequest = recorded("tensorrt_llm.llmapi.LoRARequest", _check_path)


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """The item that `submit` puts into the engine's queue. The queue's owner sets `id`."""

    prompt_token_ids: list[int]
    sampling_params: Any
    streaming: bool
    lora_request: Any
    kv_cache_retention_config: Any
    cache_salt: str | None
    id: int = 0
