"""The front's settings: frozen, validated once."""

import math
import re
from dataclasses import dataclass, field, fields

from penstock.server.front.transport import TransportConfig

_METADATA_KEY = re.compile(r"[a-z0-9_.-]{1,128}")
_MAY_BE_NONE = frozenset({"max_replays"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Bounds and defaults of one front. Raises ValueError naming the field that is off.

    Request bounds are those of `penstock.v1.ModelLimits`, which publishes them. Delivery:
    `max_backlog_tokens` of output that a reader has not taken, and `max_reader_stall_s` for a
    single write, before its stream is cut; `max_message_bytes_hint` is what a coalesced message is
    split at, `max_shared_message_bytes_hint` one that carries the events of many requests or that
    its client wants large; `max_chunk_tokens` is the most tokens a client may let a message wait
    for. Times: `default_deadline_s` for calls that bring no deadline, `max_deadline_s` the longest
    that is honoured. `acceptance_delay_s`: how long at most the first message waits for the
    engine's word, so that a refusal comes before it and clients may retry. `retry_after_s`: what
    RetryInfo says where the engine has no estimate. `is_prefix_caching` off keeps requests from
    sharing blocks, except the outputs of one request. `shares_prefixes_across_tenants` lets
    requests of different tenants share them: then the time to a first token tells one tenant what
    another has sent.

    `max_text_bytes_per_tenant`: text that one tenant may have waiting to be tokenised or being so;
    a single one that is longer is taken when it has no other.

    `tenant_metadata_key`: the metadata key that names a call's tenant, empty to tell none apart.
    Whoever can set it can be anybody: it is for services behind a proxy that knows its callers,
    sets the key, and removes it from what clients send.

    `max_replays`: how many engines a request may lose before it ends with ENGINE_DOWN; with 0 it
    ends with its first. `max_replay_wait_s`: how long it waits for the next one, each time.

    `max_resume_grace_s`: how long at most a request is kept for Resume after its call; 0 does not
    offer it. What the engine keeps of such requests is bounded: `max_resume_bytes` of all of them,
    and `max_parked_requests` that nobody reads. Beyond a bound the longest unread go.

    `transport`: how patient it is with connections and with calls that are only begun.

    `has_content`: prompts and outputs are a part of what is told of requests that have ended.
    """

    front_id: int = 1
    model_aliases: tuple[str, ...] = ()
    is_prefix_caching: bool = True
    shares_prefixes_across_tenants: bool = False
    tenant_metadata_key: str = ""
    has_content: bool = False

    default_max_tokens: int = 256
    max_output_tokens: int | None = None
    max_prompt_bytes: int = 1 << 20
    max_text_bytes_per_tenant: int = 8 << 20
    max_chat_messages: int = 512
    max_stop_strings: int = 16
    max_stop_string_chars: int = 64
    max_stop_string_bytes: int = 256
    max_stop_token_ids: int = 16
    max_n: int = 16
    max_logprobs: int = 20
    max_logit_bias: int = 300
    max_constraint_bytes: int = 1 << 16

    max_live_requests: int = 4096
    max_backlog_tokens: int = 4096
    max_reader_stall_s: float = 30.0
    max_message_bytes_hint: int = 1024
    max_shared_message_bytes_hint: int = 65536
    max_chunk_tokens: int = 256

    default_deadline_s: float = 600.0
    max_deadline_s: float = 3600.0
    acceptance_delay_s: float = 0.05
    retry_after_s: float = 1.0

    transport: TransportConfig = field(default_factory=TransportConfig)

    max_replays: int = 4
    max_replay_wait_s: float = 60.0

    max_resume_grace_s: float = 60.0
    max_resume_bytes: int = 64 << 20
    max_parked_requests: int = 1024

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{item.name} must be a number of seconds, 0 or more")
            least = 0 if item.name in _MAY_BE_NONE else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ValueError(f"{item.name} must be at least {least}")
        if self.front_id >= 2**31:
            raise ValueError("front_id must be below 2**31")
        if self.max_stop_token_ids > 16:
            raise ValueError("max_stop_token_ids must be at most 16: the batch holds no more")
        if self.default_deadline_s > self.max_deadline_s:
            raise ValueError("default_deadline_s must not exceed max_deadline_s")
        if self.default_deadline_s <= 0:
            raise ValueError("default_deadline_s must be above 0")
        if self.max_reader_stall_s <= 0:
            raise ValueError("max_reader_stall_s must be above 0")
        self._check_tenant_metadata_key()

    def _check_tenant_metadata_key(self) -> None:
        key = self.tenant_metadata_key
        if key and not _METADATA_KEY.fullmatch(key):
            raise ValueError(
                "tenant_metadata_key must be 1 to 128 of a-z, 0-9, '_', '-' and '.', as gRPC"
                f" metadata keys are, not {key!r}"
            )
        if key.startswith("grpc-") or key.endswith("-bin"):
            raise ValueError(
                f"tenant_metadata_key must not be one of gRPC's own or binary, not {key!r}"
            )
