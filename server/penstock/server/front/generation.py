"""Defines a validated generation request (`GenerationSpec`), before its prompt is tokenised.

All values are within the published limits. `submission.py` checks the limits that depend on the
number of prompt tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import CacheRetention, Constraint, SamplingParams
from penstock.server.tenants import NO_TENANT
from penstock.server.text.chat_template import NO_DATA, ChatMessage, TemplateData


class TextInput(msgspec.Struct, frozen=True, kw_only=True):
    """Plain text to tokenise."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenInput:
    """Token ids, each within the vocabulary."""

    ids: NDArray[np.int32] | tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of token ids."""
        return len(self.ids)

    def read(self) -> NDArray[np.int32]:
        """Return the ids, int32 [num_tokens]."""
        return np.asarray(self.ids, dtype=np.int32)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenInput) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash(len(self.ids))


@dataclass(slots=True, kw_only=True, eq=False)
class LongTokenInput:
    """Token ids whose conversion takes too long for the event loop.

    `convert` returns int32 [num_tokens], or raises RequestError if an id is outside the vocabulary.
    """

    num_tokens: int
    convert: Callable[[], NDArray[np.int32]] = field(repr=False)

    def read(self) -> NDArray[np.int32]:
        """Return the converted ids, int32 [num_tokens], and release the source values. Raises the
        RequestError of `convert`."""
        ids = self.convert()
        self.convert = lambda: ids
        return ids


class ChatInput(msgspec.Struct, frozen=True, kw_only=True):
    """A chat, to which the chat template of the model is applied. If `window_tokens` is set, the
    oldest messages are dropped from a prompt with more tokens."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    window_tokens: int | None = None
    data: TemplateData = NO_DATA


PromptInput = TextInput | TokenInput | LongTokenInput | ChatInput


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters. `seed` is the requested seed; None means a random seed.

    `params.seed` is set for each output at submission.
    """

    params: SamplingParams = SamplingParams()
    seed: int | None = None
    num_outputs: int = 1


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that end an output. If `max_tokens` is None, the default of the front (gRPC
    server process) applies."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False


class ChunkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The minimum number of tokens of one output per message, and the maximum time for which tokens
    are held back."""

    min_tokens: int = 1
    max_delay_s: float = 0.1

    @property
    def is_holding(self) -> bool:
        """True if tokens are held back; False if each token is sent immediately."""
        return self.min_tokens > 1 and self.max_delay_s > 0


NO_CHUNK_LIMITS: Final = ChunkLimits()
"""Nothing is held back: each message carries all events that are not sent yet."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the stream besides text, and how it is split into messages.

    `num_logprobs` and `num_prompt_logprobs` are the numbers of most likely tokens per position, -1
    without logprobs.
    """

    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    return_token_ids: bool = False
    echo: bool = False
    chunks: ChunkLimits = NO_CHUNK_LIMITS

    @property
    def wants_records(self) -> bool:
        """True if each token is sent with a record of its id."""
        return self.return_token_ids or self.num_logprobs >= 0


class Urgency(msgspec.Struct, frozen=True, kw_only=True):
    """Priority, deadlines and time limit. Times are in seconds from arrival, None for no limit."""

    priority: int = 0
    ttft_deadline_s: float | None = None
    total_deadline_s: float | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Settings of a resumable request. After the reader of its stream has disconnected, the request
    continues for up to `resume_timeout_s` seconds.

    `message` is the serialised request message from the client. Any front (gRPC server process) can
    recreate the request from `message`. It contains the prompt, so it must not be logged.
    """

    resume_timeout_s: float
    message: bytes = field(repr=False)


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated generation request. Its prompt is not tokenised yet.

    Attributes:
        prompt_path: The proto path of the prompt, for errors.
        request_id: The id set by the client; None if the server generates it.
        adapter: The name of an adapter of the executor; empty for the model without an adapter.
        tenant: The tenant of the call. The request message does not contain it.
        trace_id: The trace id of the call, 16 bytes; empty for a request without a trace.
        session_id: The name of the session within the tenant; empty without a session.
        resumption: The settings of a resumable request; None if the request ends with its call.
    """

    prompt: PromptInput
    prompt_path: str
    request_id: str | None = None
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    output: Output = Output()
    urgency: Urgency = Urgency()
    cache_salt: str = ""
    retention: CacheRetention | None = None
    constraint: Constraint | None = None
    adapter: str = ""
    tenant: str = NO_TENANT
    session_id: str = ""
    trace_id: bytes = b""
    resumption: Resumption | None = None
