"""One validated generation request, before its prompt is tokenised.

Every value here is within the published bounds; `submission.py` checks what depends on the number
of prompt tokens.
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
    """Token ids whose conversion would take too long on the event loop.

    `convert` returns int32 [num_tokens], or raises RequestError if an id is not within the
    vocabulary.
    """

    num_tokens: int
    convert: Callable[[], NDArray[np.int32]] = field(repr=False)

    def read(self) -> NDArray[np.int32]:
        """Return the converted ids, and release the source values."""
        ids = self.convert()
        self.convert = lambda: ids
        return ids


class ChatInput(msgspec.Struct, frozen=True, kw_only=True):
    """A chat for the model's chat template; `window_tokens` bounds the part that is kept."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    window_tokens: int | None = None
    data: TemplateData = NO_DATA


PromptInput = TextInput | TokenInput | LongTokenInput | ChatInput


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. `params.seed` is set later. `seed` None: use a random seed."""

    params: SamplingParams = SamplingParams()
    seed: int | None = None
    num_outputs: int = 1


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """When an output ends. `max_tokens` None: the default of the model."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False


class ChunkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of one output a message waits for, and for how long at most."""

    min_tokens: int = 1
    max_delay_s: float = 0.1

    @property
    def is_holding(self) -> bool:
        """Whether tokens are held back; False if each is sent at once."""
        return self.min_tokens > 1 and self.max_delay_s > 0


WHOLE_BACKLOG: Final = ChunkLimits()
"""Each message carries the whole backlog."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What the stream carries besides text, and how it is split into messages.

    `num_logprobs` as in `SamplingParams`: -1 for none.
    """

    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    return_token_ids: bool = False
    echo: bool = False
    chunks: ChunkLimits = WHOLE_BACKLOG

    @property
    def wants_records(self) -> bool:
        """True when each token comes with its id."""
        return self.return_token_ids or self.num_logprobs >= 0


class Urgency(msgspec.Struct, frozen=True, kw_only=True):
    """Priority, deadlines and time limit; times in seconds from arrival, None for none."""

    priority: int = 0
    ttft_deadline_s: float | None = None
    total_deadline_s: float | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The request outlives its call, for `grace_s` after its stream lost its last reader.

    `message`: the request as its client sent it, serialised, from which any front can recreate it.
    It contains the prompt: never log or dump it.
    """

    grace_s: float
    message: bytes = field(repr=False)


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request. `prompt_path`: the proto path of the prompt, for errors.

    `adapter`: a name that the executor knows, empty for none. `tenant` and `trace_id` (16 bytes,
    empty for an untraced request) are properties of the call, not of the message. `session_id`: the
    tenant's name of the session, empty for none. `resumption`: None if the request ends with its
    call.
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
