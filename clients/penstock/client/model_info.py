"""Models of a server and its health, as frozen values."""

from dataclasses import dataclass

from penstock.client.contract_enum import ContractEnum


class ModelState(ContractEnum):
    """The state of a model.

    Attributes:
        UNKNOWN: A state that is newer than this client.
        UNSPECIFIED: Not reported.
        LOADING: Being loaded; requests fail with `ModelNotReady`.
        READY: Serving.
        RECOVERING: Its engine restarts; live requests wait for it.
        DRAINING: Finishes its live requests and rejects new ones.
        FAILED: Could not be loaded, or its engine stopped too often.
        REGISTERED: Not in memory; the first request for it loads it.
        UNLOADING: Frees its memory.
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
        SERVING: Takes requests.
        NOT_SERVING: Takes no requests, e.g. while it starts or drains.
        SERVICE_UNKNOWN: The server has no service of this name.
    """

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of a model; None: not known, which does not mean "no limit".

    Attributes:
        max_prompt_tokens: Tokens of a prompt.
        max_output_tokens: Largest `max_tokens`.
        max_total_tokens: Prompt and output together.
        default_max_tokens: `max_tokens` of a request that does not set it.
        vocab_size: Token ids are below this.
        max_prompt_bytes: UTF-8 bytes of prompt text, before and after the chat template.
        max_chat_messages: Messages of a conversation.
        max_stop_strings: Entries of `stop`.
        max_stop_string_chars: Characters of one stop string.
        max_stop_string_bytes: UTF-8 bytes of one stop string.
        max_stop_token_ids: Entries of `stop_token_ids`.
        max_num_outputs: Largest `n`.
        max_logprobs: Largest `logprobs` and `prompt_logprobs`.
        max_logit_bias: Entries of `logit_bias`.
        max_identifier_chars: Characters of `request_id`, `cache_salt` and `session_id`.
        max_chunk_tokens: Largest `min_chunk_tokens`.
        max_constraint_bytes: UTF-8 bytes of a constraint.
        max_images: Images of a conversation.
        max_image_bytes: Bytes of one image.
        max_message_bytes: Bytes of a request message.
        max_metadata_bytes: Bytes of a call's metadata.
        max_concurrent_streams: Open calls of one connection.
        max_pending_requests: Requests in the queue.
        max_pending_tokens: Prompt tokens in the queue.
        max_resume_timeout_s: Largest `resume_grace_s`; 0: resuming is not offered.
        reader_stall_timeout_s: Time for which a client may leave a stream unread.
        default_timeout_s: Timeout of a request that has none.
        max_timeout_s: Largest timeout; a longer deadline counts as this.
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
    """How connections are kept alive and renewed, in seconds; None: not known.

    Attributes:
        min_client_ping_interval_s: The server disconnects clients that ping more often.
        server_ping_interval_s: Time between pings of the server.
        server_ping_timeout_s: An unanswered ping ends the connection after this time.
        max_connection_age_s: The server ends a connection after about this time.
        max_connection_age_grace_s: How long open calls continue after that.
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
        name: Unique on the server.
        aliases: Other names.
        is_default: Whether requests without a model use this one.
        state: Its state.
        limits: Limits for requests.
        keepalive: How the server treats connections.
        features: Pairs of a feature's name and whether the model has it; see `supports`.
        adapters: Names of its LoRA adapters.
        executor: "torch", "trtllm" or "simulated".
        ready_at_s: When it became ready, seconds since 1970-01-01 UTC; None before.
        quantization: Number format of the weights, e.g. "fp8"; "": not known.
        kv_cache_dtype: Number format of the KV cache, e.g. "fp8"; "": not known.
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
        """Return whether the model can do this, e.g. "logprobs"; None: not known."""
        return dict(self.features).get(feature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """The tokens of a prompt.

    Attributes:
        token_ids: Token ids.
        rendered_text: A conversation as the chat template renders it; "" for plain text.
        num_dropped_messages: Messages that `ChatPrompt.window_tokens` left out.
    """

    token_ids: tuple[int, ...]
    rendered_text: str
    num_dropped_messages: int = 0
