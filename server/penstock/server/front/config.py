"""The settings of a front (gRPC server process). They are immutable and validated once."""

import re
from dataclasses import dataclass, field

from penstock.scheduler.setting import SettingError, check, setting

_MAX_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Connection limits of one front process. An invalid value raises SettingError, which names the
    field.

    Connections beyond `max_connections` are rejected, so that many connections cannot exhaust
    memory and file descriptors. After `max_connection_age_s`, plus or minus 10 %, a connection
    accepts no more calls; the client then opens another connection, possibly to another server.
    """

    max_connections: int = setting(
        2000,
        "connections",
        "open connections of one front",
        at_least=1,
        at_most=1_000_000,
    )
    handshake_timeout_s: float = setting(
        10.0,
        "connections",
        "seconds for the TLS and HTTP/2 handshakes of a new connection",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    max_arrival_s: float = setting(
        30.0,
        "connections",
        "seconds that a request message may take to arrive",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    max_connection_age_s: float = setting(
        1800.0,
        "connections",
        "seconds after which a connection takes no more calls, so that clients reconnect and"
        " spread",
        above=0,
        at_most=_MAX_WAIT_S,
    )

    def __post_init__(self) -> None:
        check(self)


_METADATA_KEY = re.compile(r"[a-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Limits and defaults of one front. An invalid value raises SettingError, which names the
    field.

    `penstock.v1.ModelLimits` describes the limits of requests and publishes them to clients. A
    message that combines several steps is split if it would exceed the soft limit
    `max_message_bytes_hint`. For messages that carry events of several requests, or if the client
    requested larger messages, the soft limit is `max_shared_message_bytes_hint`. `max_resume_bytes`
    (including prompts) and `max_detached_requests` limit the streams that the engine keeps for
    Resume. If a limit is exceeded, streams of the tenant with the most bytes or the most detached
    requests are dropped.

    Attributes:
        max_chunk_tokens: The maximum of `min_chunk_tokens` in a request.
        acceptance_delay_s: Maximum time that the first message waits for the engine's first event,
            in seconds. A rejected request then fails before its first message, so that the client
            may retry it.
        retry_after_s: The delay in RetryInfo of a retryable error if there is no estimate, in
            seconds.
        is_prefix_caching: Whether requests with equal prefixes share KV cache blocks. Without it,
            only the outputs of one request share blocks.
        shares_prefixes_across_tenants: Whether requests of different tenants share blocks. If so, a
            tenant can infer prompts of other tenants from the time to first token.
        max_text_bytes_per_tenant: Limit of the text that waits to be tokenised, per tenant. A
            single longer text is accepted if its tenant has no other waiting text.
        tenant_metadata_key: The metadata key in which a proxy sends the tenant of a call; empty for
            a single tenant.
        has_content: Whether the records of ended requests include the start of prompts and outputs.
    """

    front_id: int = setting(1, at_least=1, below=2**31)
    model_aliases: tuple[str, ...] = setting(
        (), "model", "further model names that clients may use", shown="none"
    )
    is_prefix_caching: bool = setting(
        True, "cache", "whether requests share the blocks of equal prefixes", name="prefix_caching"
    )
    shares_prefixes_across_tenants: bool = setting(
        False,
        "cache",
        "whether tenants share the blocks of equal prefixes",
        name="share_prefixes_across_tenants",
    )
    tenant_metadata_key: str = setting(
        "",
        "tenants",
        "metadata key with the tenant of a call; only behind a proxy that sets it and removes it"
        " from clients' calls",
        metavar="KEY",
        shown="none: one tenant",
    )
    has_content: bool = False

    default_max_tokens: int = setting(
        256, "requests", "max_tokens of a request without it", at_least=1
    )
    max_output_tokens: int | None = setting(
        None,
        "requests",
        "largest max_tokens",
        at_least=1,
        shown="limited by the model's context",
    )
    max_prompt_bytes: int = setting(1 << 20, at_least=1)
    max_text_bytes_per_tenant: int = setting(
        8 << 20,
        "requests",
        "bytes of one tenant's text that may wait to be tokenised at one front",
        at_least=1,
    )
    max_chat_messages: int = setting(512, at_least=1)
    max_stop_strings: int = setting(16, at_least=1)
    max_stop_string_chars: int = setting(64, at_least=1)
    max_stop_string_bytes: int = setting(256, at_least=1)
    max_stop_token_ids: int = setting(16, at_least=1, at_most=16)
    """The maximum is 16, the size of the arrays in the batch."""
    max_num_outputs: int = setting(16, at_least=1)
    max_logprobs: int = setting(20, at_least=1)
    max_logit_bias: int = setting(300, at_least=1)
    max_constraint_bytes: int = setting(1 << 16, at_least=1)

    max_live_requests: int = setting(4096, at_least=1)
    max_backlog_tokens: int = setting(
        4096, "delivery", "unread output tokens before a client is disconnected", at_least=1
    )
    max_reader_stall_s: float = setting(
        30.0,
        "delivery",
        "seconds that one write may block before its reader is disconnected",
        above=0,
    )
    max_message_bytes_hint: int = setting(1024, at_least=1)
    max_shared_message_bytes_hint: int = setting(65536, at_least=1)
    max_chunk_tokens: int = setting(256, at_least=1)

    default_deadline_s: float = setting(
        600.0,
        "deadlines",
        "deadline of a request without total_timeout and gRPC deadline, seconds; if it is not"
        " complete by then it fails with DEADLINE_EXCEEDED",
        above=0,
    )
    max_deadline_s: float = setting(
        3600.0,
        "deadlines",
        "maximum deadline, seconds; a later gRPC deadline is lowered to it, a longer timeout is"
        " rejected",
        at_least=0,
    )
    acceptance_delay_s: float = setting(0.05, at_least=0)
    retry_after_s: float = setting(1.0, at_least=0)

    transport: TransportConfig = field(default_factory=TransportConfig)

    max_replays: int = setting(
        4,
        "survival",
        "how often a request is replayed after an engine's death, 0 for never",
        at_least=0,
    )
    max_replay_wait_s: float = setting(
        60.0, "survival", "seconds that a request waits for another engine", at_least=0
    )

    max_resume_timeout_s: float = setting(
        60.0,
        "survival",
        "maximum time that a request is kept for Resume, seconds; 0 disables Resume",
        at_least=0,
    )
    max_resume_bytes: int = setting(
        64 << 20,
        "survival",
        "maximum bytes of all requests that the engine keeps for Resume; each front keeps at most"
        " as many bytes of their results",
        at_least=1,
    )
    max_detached_requests: int = setting(
        1024,
        "survival",
        "maximum number of detached requests, which are resumable requests without a reader",
        at_least=1,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.default_deadline_s > self.max_deadline_s:
            raise SettingError("{} must not exceed {}", "default_deadline_s", "max_deadline_s")
        self._check_tenant_metadata_key()

    def _check_tenant_metadata_key(self) -> None:
        key = self.tenant_metadata_key
        if key and not _METADATA_KEY.fullmatch(key):
            raise SettingError(
                "{} must be 1 to 128 of a-z, 0-9, '_', '-' and '.', as gRPC metadata keys are, not"
                f" {key!r}",
                "tenant_metadata_key",
            )
        if key.startswith("grpc-") or key.endswith("-bin"):
            raise SettingError(
                f"{{}} must not be one of gRPC's own or binary, not {key!r}", "tenant_metadata_key"
            )
