"""Immutable values that describe the models of a server, and the health of the server."""

from dataclasses import dataclass

from penstock.client.contract_enum import ContractEnum


class ModelState(ContractEnum):
    """The state of a model.

    Attributes:
        UNKNOWN: A state that is newer than this client.
        UNSPECIFIED: Not reported.
        LOADING: Is being loaded; requests fail with `ModelNotReady`.
        READY: Serving.
        RECOVERING: Its engine is restarting; live requests wait for it.
        DRAINING: Finishes its live requests and rejects new ones.
        FAILED: Could not be loaded, or its engine crashed too often.
        REGISTERED: Not in memory; the first request for it loads it.
        UNLOADING: Its memory is being freed.
    """

    UNKNOWN = -1
    UNSPECIFIED = 0
    LOADING = 1
    READY = 2
    RECOVERING = 3
    DRAINING = 4
    FAILED = 5
    REGISTERED = 6
    UNLOADING = 7


class HealthStatus(ContractEnum):
    """The state that grpc.health.v1 reports.

    Attributes:
        UNKNOWN: Not reported, or newer than this client.
        SERVING: Accepts requests.
        NOT_SERVING: Accepts no requests, e.g. while it starts or drains.
        SERVICE_UNKNOWN: The server has no service with this name.
    """

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of a model: maximum values, unless described otherwise. None means that a limit is
    unknown, not that there is none.

    Attributes:
        max_prompt_tokens: Tokens of a prompt.
        max_output_tokens: Maximum of `max_tokens`.
        max_total_tokens: Tokens of prompt and output together.
        default_max_tokens: `max_tokens` of a request that does not set it.
        vocab_size: Size of the vocabulary. Token ids are smaller.
        max_prompt_bytes: UTF-8 bytes of prompt text, before and after the chat template.
        max_chat_messages: Messages of a conversation.
        max_stop_strings: Entries of `stop`.
        max_stop_string_chars: Characters of one stop string.
        max_stop_string_bytes: UTF-8 bytes of one stop string.
        max_stop_token_ids: Entries of `stop_token_ids`.
        max_num_outputs: Maximum of `n`.
        max_logprobs: Maximum of `logprobs` and `prompt_logprobs`.
        max_logit_bias: Entries of `logit_bias`.
        max_identifier_chars: Characters of `request_id`, `cache_salt` and `session_id`.
        max_chunk_tokens: Maximum of `min_chunk_tokens`.
        max_constraint_bytes: UTF-8 bytes of a constraint.
        max_images: Images of a conversation.
        max_image_bytes: Bytes of one image.
        max_message_bytes: Bytes of a request message.
        max_metadata_bytes: Bytes of a call's metadata.
        max_concurrent_streams: Open calls of one connection.
        max_pending_requests: Requests in the queue.
        max_pending_tokens: Tokens of the requests in the queue: their prompts, and what they
            generated before a preemption.
        max_resume_timeout_s: Maximum of `resume_timeout_s`; 0 if requests cannot be resumed.
        reader_stall_timeout_s: Time after which a stream that its client does not read is ended.
        default_timeout_s: Timeout of a request without `total_timeout_s` and without a gRPC
            deadline.
        max_timeout_s: Maximum timeout; a longer deadline is lowered to this.
    """

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
    """How connections are kept alive and renewed, in seconds; None if unknown.

    Attributes:
        min_client_ping_interval_s: Minimum interval between pings of a client. The server
            disconnects clients that ping more often.
        server_ping_interval_s: Interval at which the server pings idle connections.
        server_ping_timeout_s: The connection ends if a ping is not acknowledged within this time.
        max_connection_age_s: Age at which the server sends GOAWAY: new calls then need another
            connection.
        max_connection_age_grace_s: How long open calls may continue after that.
    """

    min_client_ping_interval_s: float | None = None
    server_ping_interval_s: float | None = None
    server_ping_timeout_s: float | None = None
    max_connection_age_s: float | None = None
    max_connection_age_grace_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of a server.

    Attributes:
        name: Its name, which is unique on the server.
        aliases: Other names.
        is_default: Whether requests without a model use this one.
        state: Its state.
        limits: Limits for requests.
        keepalive: How the server keeps connections alive and renews them.
        features: Pairs of the name of a feature and True if the model has it; see `supports`.
        adapters: Names of its LoRA adapters.
        executor: "torch", "trtllm" or "simulated".
        ready_at_s: When it became ready, seconds since 1970-01-01 UTC; None before.
        quantization: Number format to which the weights are quantized, e.g. "fp8"; "none" if they
            are not; "" if unknown.
        kv_cache_dtype: Number format of the KV cache, e.g. "fp8"; "" if unknown.
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
        """Return whether the model has a feature, e.g. "logprobs"; None if that is unknown."""
        return dict(self.features).get(feature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """The tokens of a prompt.

    Attributes:
        token_ids: Token ids.
        rendered_text: The text to which the chat template renders a conversation; "" for plain
            text.
        num_dropped_messages: Number of messages dropped to fit `ChatPrompt.window_tokens`.
    """

    token_ids: tuple[int, ...]
    rendered_text: str
    num_dropped_messages: int = 0
