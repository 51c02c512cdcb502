"""What comes back from a generation, as frozen values.

Owns the events of a stream and the whole result. Every event carries `sequence`, which counts the
messages of one stream from 0. Durations are seconds, as the server measured them.
"""

import enum
from dataclasses import dataclass
from typing import TypeAlias


class RequestState(enum.IntEnum):
    """Where a request stands. UNKNOWN: a state that is newer than this client."""

    UNKNOWN = -1
    UNSPECIFIED = 0
    PENDING = 1
    PROCESSING = 2
    COMPLETED = 3
    ERROR = 4


class FinishReason(enum.IntEnum):
    """Why an output ended well. UNKNOWN: a reason that is newer than this client."""

    UNKNOWN = -1
    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    TIME_LIMIT = 3
    CANCELLED = 4


class WaitReason(enum.IntEnum):
    """What a PENDING request waits for. UNKNOWN: a reason that is newer than this client."""

    UNKNOWN = -1
    UNSPECIFIED = 0
    BLOCKS = 1
    SLOTS = 2
    TOKEN_BUDGET = 3
    FAIRNESS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request is in the queue: always the first event.

    A second one means that the call was tried again before it had any output. `seed` sent back
    with the same request gives the same tokens, where the model has the feature "seed"; it is 0 and
    means nothing elsewhere. `estimated_queue_s` None: no estimate.
    `num_dropped_messages`: what the window of a conversation left out. `trace_id`: in
    hexadecimal, empty where the request is not traced.
    """

    sequence: int
    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    estimated_queue_s: float | None
    num_dropped_messages: int = 0
    trace_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The request moved. `queue_position` 0 is next; None and `estimated_queue_s` None: unknown."""

    sequence: int
    state: RequestState
    queue_position: int | None
    wait_reason: WaitReason
    num_cached_prompt_tokens: int
    num_preemptions: int
    queue_s: float
    estimated_queue_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the most likely tokens at a position; `logprob` is natural."""

    id: int
    logprob: float
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One token. `logprob` (natural) and `rank` (1 is the most likely) only if asked for.

    `token_bytes`: what it adds to the text, with `logprob`; None where that depends on neighbours.
    """

    id: int
    logprob: float | None
    rank: int | None
    top_logprobs: tuple[TopLogprob, ...]
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEcho:
    """The next piece of the prompt, as asked for with `echo` or `prompt_logprobs`."""

    sequence: int
    text: str
    records: tuple[TokenRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New output: `text` to append to output `output_index`, for `num_tokens` new tokens.

    `records` is empty unless ids or logprobs were asked for. `text` may lag behind: it holds whole
    characters only, and nothing that may still become a stop string.
    """

    sequence: int
    output_index: int
    text: str
    records: tuple[TokenRecord, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEnd:
    """How one output ended. At most one of `stop_string` and `stop_token_id` is set."""

    output_index: int
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    num_completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token accounts of a request, over all its outputs."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, in seconds. `ttft_s` None: there was no token."""

    queue_s: float
    prefill_s: float
    ttft_s: float | None
    decode_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The request ended well: always the last event."""

    sequence: int
    outputs: tuple[OutputEnd, ...]
    usage: Usage
    timings: Timings
    num_preemptions: int

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second of decoding, over all outputs; None if too few to tell.

        The first token of each output belongs to prefill and is not counted.
        """
        num_decoded = self.usage.num_completion_tokens - len(self.outputs)
        if num_decoded <= 0 or self.timings.decode_s <= 0:
            return None
        return num_decoded / self.timings.decode_s


Event: TypeAlias = Accepted | Progress | PromptEcho | Tokens | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One whole output."""

    index: int
    text: str
    records: tuple[TokenRecord, ...]
    end: OutputEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A whole generation. `prompt` None unless asked for; `outputs` by index."""

    accepted: Accepted
    prompt: PromptEcho | None
    outputs: tuple[Output, ...]
    finished: Finished

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text
