"""The events and results of a generation, as immutable values.

Defines the events of a stream and the complete result. Durations are measured by the server, in
seconds. Every event of a stream has `sequence`, which counts its messages from 0.
"""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.client.contract_enum import ContractEnum


class RequestState(ContractEnum):
    """The state of a request.

    Attributes:
        UNKNOWN: A state that is newer than this client.
        UNSPECIFIED: Not reported.
        PENDING: In the queue; it has no KV cache blocks.
        PROCESSING: In the running batch: prefill or decode.
        COMPLETED: Ended without a failure; cancelled requests too.
        ERROR: Failed.
    """

    UNKNOWN = -1
    UNSPECIFIED = 0
    PENDING = 1
    PROCESSING = 2
    COMPLETED = 3
    ERROR = 4


class FinishReason(ContractEnum):
    """Why an output ended without an error.

    Attributes:
        UNKNOWN: A reason that is newer than this client.
        UNSPECIFIED: Not reported.
        STOP: The model's end-of-sequence token, a stop string or a stop token id.
        LENGTH: `max_tokens`, or the end of the model's context.
        TIME_LIMIT: `time_limit_s` has passed; the text until then was delivered.
        CANCELLED: The request was cancelled.
    """

    UNKNOWN = -1
    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    TIME_LIMIT = 3
    CANCELLED = 4


class WaitReason(ContractEnum):
    """What a PENDING request waits for.

    Attributes:
        UNKNOWN: A reason that is newer than this client.
        UNSPECIFIED: Not waiting, or no step has considered the request yet.
        BLOCKS: KV cache blocks.
        SLOTS: A slot in the running batch.
        TOKEN_BUDGET: Earlier requests used the token budget of the step.
        FAIRNESS: Requests of other tenants come first, by fair share.
    """

    UNKNOWN = -1
    UNSPECIFIED = 0
    BLOCKS = 1
    SLOTS = 2
    TOKEN_BUDGET = 3
    FAIRNESS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The first event: the request is in the queue. A second `Accepted` means a retried call.

    Attributes:
        sequence: Number of the message in the stream, from 0.
        request_id: The id that the caller or the server assigned.
        model: Name of the model that processes the request.
        num_prompt_tokens: Number of tokens of the prompt, including the chat template and special
            tokens.
        seed: The seed with which the same request gives the same tokens; 0 if the model does not
            have the feature "seed".
        estimated_queue_s: Estimated wait before the first step, in seconds; None without an
            estimate.
        num_dropped_messages: Number of messages dropped to fit `ChatPrompt.window_tokens`.
        trace_id: W3C trace id, 32 hexadecimal digits; "" if the request is not traced.
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
    """The state of the request has changed, or it is still waiting.

    Attributes:
        sequence: Number of the message in the stream, from 0.
        state: PENDING or PROCESSING.
        queue_position: Number of requests ahead of this one in the queue; None if unknown or not
            PENDING.
        wait_reason: What the request waits for, while PENDING.
        num_cached_prompt_tokens: Number of prompt tokens found in the KV cache, which are not
            computed again.
        num_preemptions: How often the request was preempted.
        queue_s: Time in the queue so far, in seconds.
        estimated_queue_s: Estimated wait from now on, in seconds; None without an estimate.
    """

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
    """One of the most likely tokens at a position.

    Attributes:
        id: Token id.
        logprob: Natural logarithm of its probability.
        token_bytes: Bytes that the token adds to the text; None if they depend on adjacent tokens.
    """

    id: int
    logprob: float
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One token of a prompt or an output.

    Attributes:
        id: Token id.
        logprob: Natural logarithm of its probability; None without `logprobs` (for a prompt:
            `prompt_logprobs`), and for the first token of a prompt.
        rank: 1 for the most likely token; None where `logprob` is None.
        top_logprobs: The k most likely tokens, for `logprobs=k` or `prompt_logprobs=k`.
        token_bytes: Bytes that the token adds to the text; None without log-probabilities, or if
            they depend on adjacent tokens.
    """

    id: int
    logprob: float | None
    rank: int | None
    top_logprobs: tuple[TopLogprob, ...]
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """The prompt, or a part of it.

    Attributes:
        text: Its text; "" without `echo`.
        records: Its tokens; empty without `prompt_logprobs`, unless both `echo` and
            `return_token_ids` are set. The first token of a prompt has no `logprob`.
    """

    text: str
    records: tuple[TokenRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEcho(EchoedPrompt):
    """The next part of the prompt; only if `echo` or `prompt_logprobs` is set.

    Attributes:
        sequence: Number of the message in the stream, from 0.
    """

    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens of one output.

    Attributes:
        sequence: Number of the message in the stream, from 0.
        output_index: Which of the `n` outputs, from 0.
        text: Text to append to the output. It may lag behind `num_tokens`: it has only complete
            characters, and no text that may become a stop string.
        records: One for each token; empty without `return_token_ids` and `logprobs`.
        num_tokens: Number of new tokens.
    """

    sequence: int
    output_index: int
    text: str
    records: tuple[TokenRecord, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEnd:
    """The end of one output.

    Attributes:
        output_index: Which of the `n` outputs, from 0.
        finish_reason: Why it ended.
        stop_string: The stop string that ended it, or None.
        stop_token_id: The stop token id that ended it, or None.
        num_completion_tokens: Number of tokens generated.
    """

    output_index: int
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    num_completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request, over all its outputs.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        num_completion_tokens: Tokens generated.
        num_cached_prompt_tokens: Prompt tokens found in the KV cache when the request first entered
            the running batch.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The time of a request in each phase, in seconds.

    Attributes:
        queue_s: Total time in the queue, including the time after preemptions.
        prefill_s: From entry into the running batch to the first token, plus the recomputation
            after preemptions.
        ttft_s: From arrival to the first token of any output; None if there was none.
        decode_s: From the first token to the last token, without the time in the queue after
            preemptions.
        total_s: From arrival to the end.
    """

    queue_s: float
    prefill_s: float
    ttft_s: float | None
    decode_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """The end of a request without an error.

    Attributes:
        outputs: The end of each output.
        usage: Token counts of the request.
        timings: The time in each phase.
        num_preemptions: How often the request was preempted.
    """

    outputs: tuple[OutputEnd, ...]
    usage: Usage
    timings: Timings
    num_preemptions: int

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second of decoding, over all outputs; None if there are too few tokens
        or the time is 0.

        The first token of each output belongs to the prefill and is not counted.
        """
        num_decoded = self.usage.num_completion_tokens - len(self.outputs)
        if num_decoded <= 0 or self.timings.decode_s <= 0:
            return None
        return num_decoded / self.timings.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(RequestEnd):
    """The last event: the request ended without an error.

    Attributes:
        sequence: Number of the message in the stream, from 0.
    """

    sequence: int


Event: TypeAlias = Accepted | Progress | PromptEcho | Tokens | Finished
"""An event of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One complete output.

    Attributes:
        index: Which of the `n` outputs, from 0.
        text: Its text.
        records: One for each token; empty without `return_token_ids` and `logprobs`.
        end: How it ended.
    """

    index: int
    text: str
    records: tuple[TokenRecord, ...]
    end: OutputEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A complete generation.

    Attributes:
        accepted: The first event.
        prompt: The prompt; None without `echo` and `prompt_logprobs`.
        outputs: The outputs, in the order of `finished.outputs`.
        finished: How the request ended.
    """

    accepted: Accepted
    prompt: EchoedPrompt | None
    outputs: tuple[Output, ...]
    finished: RequestEnd

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text
