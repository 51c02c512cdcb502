"""What a server tells about its models, as frozen values."""

import enum
from dataclasses import dataclass


class ModelState(enum.IntEnum):
    """Where a model stands. UNKNOWN: a state that is newer than this client."""

    UNKNOWN = -1
    UNSPECIFIED = 0
    LOADING = 1
    READY = 2
    RECOVERING = 3
    DRAINING = 4
    FAILED = 5
    REGISTERED = 6
    UNLOADING = 7


class HealthStatus(enum.IntEnum):
    """What grpc.health.v1 says. UNKNOWN: not told, or newer than this client."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Every bound a request is checked against; None: not known, which is not "no bound"."""

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None
    default_max_tokens: int | None = None
    vocab_size: int | None = None
    max_prompt_bytes: int | None = None
    max_chat_messages: int | None = None
    max_stop_strings: int | None = None
    max_stop_string_chars: int | None = None
    max_stop_string_bytes: int | None = None
    max_stop_token_ids: int | None = None
    max_num_outputs: int | None = None
    max_logprobs: int | None = None
    max_logit_bias: int | None = None
    max_identifier_chars: int | None = None
    max_chunk_tokens: int | None = None
    max_constraint_bytes: int | None = None
    max_images: int | None = None
    max_image_bytes: int | None = None
    max_message_bytes: int | None = None
    max_metadata_bytes: int | None = None
    max_concurrent_streams: int | None = None
    max_pending_requests: int | None = None
    max_pending_tokens: int | None = None
    max_resume_timeout_s: float | None = None
    reader_stall_timeout_s: float | None = None
    default_timeout_s: float | None = None
    max_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepalivePolicy:
    """How connections are kept alive and renewed, in seconds; None: not known."""

    min_client_ping_interval_s: float | None = None
    server_ping_interval_s: float | None = None
    server_ping_timeout_s: float | None = None
    max_connection_age_s: float | None = None
    max_connection_age_grace_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model a server knows.

    `features`: names of `ModelFeatures` and whether they are there; a missing name is not known.
    `ready_at_s`: when it became ready, in seconds since 1970-01-01 UTC; None before that.
    `quantization`, `kv_cache_dtype`: number formats of weights and of cached keys and values, e.g.
    "fp8"; "" where they are not known.
    """

    name: str
    aliases: tuple[str, ...]
    is_default: bool
    state: ModelState
    limits: ModelLimits
    keepalive: KeepalivePolicy
    features: tuple[tuple[str, bool], ...]
    adapters: tuple[str, ...]
    executor: str
    ready_at_s: float | None
    quantization: str = ""
    kv_cache_dtype: str = ""

    def supports(self, feature: str) -> bool | None:
        """Whether the model can do this, e.g. "logprobs"; None: not known."""
        return dict(self.features).get(feature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """Token ids of a prompt, and what the chat template made of a dialogue ("" for plain text).

    `num_dropped_messages`: what the window of a dialogue left out.
    """

    token_ids: tuple[int, ...]
    rendered_text: str
    num_dropped_messages: int = 0
