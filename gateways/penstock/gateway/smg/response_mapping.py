"""Converts the events of a Penstock response to a gateway's messages: token ids, numbers of tokens
and log-probabilities.

Text is not sent, because the gateway detokenises. Each output has one final message. In a stream,
chunks contain new tokens and the final message contains none; without a stream, the final message
contains all tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.scheduler.request import FinishReason
from penstock.server.front import events

_MAX_CHUNK_TOKENS: Final = 256
"""Maximum number of tokens per chunk: some tens of KiB with twenty top log-probabilities for each
token."""

REASONS: Final[dict[FinishReason, str]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    # The gateway has no such reason; a limit was reached.
    FinishReason.TIME_LIMIT: "length",
    FinishReason.CANCELLED: "abort",
}


class _PromptInfo:
    """The token counts and the log-probabilities of a request's prompt."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_records: list[events.TokenRecord] = []
        self._has_run = False

    def receive(self, event: events.StreamEvent) -> None:
        """Store the token counts or log-probabilities of the prompt that an event contains. Other
        events are ignored.
        """
        match event:
            case events.Accepted():
                self.num_prompt_tokens = event.num_prompt_tokens
            case events.PromptPiece():
                self.prompt_records.extend(event.records)
            case events.Progress() if event.state.name == "PROCESSING" and not self._has_run:
                # After a preemption, a request finds its own blocks in the cache.
                self._has_run = True
                self.num_cached_tokens = event.num_cached_prompt_tokens
            case _:
                pass

    def prompt_logprobs(self) -> vllm.InputLogProbs | None:
        """Return the log-probabilities of the whole prompt; None if they were not requested."""
        return _input_logprobs(self.prompt_records) if self.prompt_records else None


class ChunkEncoder:
    """Encodes the messages of a streamed response. `usage` has the request's token counts; None
    until it has ended."""

    def __init__(self) -> None:
        self.usage: events.Usage | None = None
        self._prompt_info = _PromptInfo()
        self._begun: set[int] = set()

    def encode(self, batch: Iterable[events.StreamEvent]) -> Iterator[bytes]:
        """Yield the serialised messages for these events."""
        records: dict[int, list[events.TokenRecord]] = {}
        for event in batch:
            match event:
                case events.TokensPiece():
                    records.setdefault(event.output_index, []).extend(event.records)
                case events.Finished():
                    self.usage = event.usage
                    yield from self._chunks(records)
                    records = {}
                    for end in event.outputs:
                        yield _complete(end, event.usage, (), None)
                case _:
                    self._prompt_info.receive(event)
        yield from self._chunks(records)

    def _chunks(self, records: dict[int, list[events.TokenRecord]]) -> Iterator[bytes]:
        for index, all_records in records.items():
            for start in range(0, len(all_records), _MAX_CHUNK_TOKENS):
                yield self._chunk(index, all_records[start : start + _MAX_CHUNK_TOKENS])

    def _chunk(self, index: int, records: Sequence[events.TokenRecord]) -> bytes:
        is_first = index not in self._begun
        self._begun.add(index)
        chunk = vllm.GenerateStreamChunk(
            token_ids=[record.token_id for record in records],
            prompt_tokens=self._prompt_info.num_prompt_tokens,
            # Only the tokens of this chunk, because the gateway adds the numbers of all chunks.
            completion_tokens=len(records),
            cached_tokens=self._prompt_info.num_cached_tokens,
            output_logprobs=_output_logprobs(records),
            input_logprobs=self._prompt_info.prompt_logprobs() if is_first else None,
            index=index,
        )
        return vllm.GenerateResponse(chunk=chunk).SerializeToString()


class NonStreamingEncoder:
    """Encodes a response that is not streamed: one message per output, at the end.

    `usage` has the request's token counts; None until it has ended.
    """

    def __init__(self) -> None:
        self.usage: events.Usage | None = None
        self._prompt_info = _PromptInfo()
        self._records: dict[int, list[events.TokenRecord]] = {}

    def encode(self, batch: Iterable[events.StreamEvent]) -> Iterator[bytes]:
        """Collect these events. After the last event, yield one message per output."""
        for event in batch:
            match event:
                case events.TokensPiece():
                    self._records.setdefault(event.output_index, []).extend(event.records)
                case events.Finished():
                    self.usage = event.usage
                    for end in event.outputs:
                        records = self._records.pop(end.output_index, [])
                        logprobs = self._prompt_info.prompt_logprobs()
                        yield _complete(end, event.usage, records, logprobs)
                case _:
                    self._prompt_info.receive(event)


def _complete(
    end: events.OutputEnd,
    usage: events.Usage,
    records: Sequence[events.TokenRecord],
    prompt_logprobs: vllm.InputLogProbs | None,
) -> bytes:
    complete = vllm.GenerateComplete(
        output_ids=[record.token_id for record in records],
        finish_reason=REASONS[end.reason],
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=end.num_completion_tokens,
        cached_tokens=usage.num_cached_prompt_tokens,
        output_logprobs=_output_logprobs(records),
        input_logprobs=prompt_logprobs,
        index=end.output_index,
    )
    if end.stop_string is not None:
        complete.matched_stop_str = end.stop_string
    elif end.stop_token_id is not None:
        complete.matched_token_id = end.stop_token_id
    return vllm.GenerateResponse(complete=complete).SerializeToString()


def _output_logprobs(records: Sequence[events.TokenRecord]) -> vllm.OutputLogProbs | None:
    if not records or records[0].logprob is None:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[record.logprob or 0.0 for record in records],
        token_ids=[record.token_id for record in records],
        top_logprobs=[_top(record) for record in records],
    )


def _input_logprobs(records: Sequence[events.TokenRecord]) -> vllm.InputLogProbs:
    return vllm.InputLogProbs(
        token_logprobs=[vllm.InputTokenLogProb(value=record.logprob) for record in records],
        token_ids=[record.token_id for record in records],
        top_logprobs=[_top(record) for record in records],
    )


def _top(record: events.TokenRecord) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        values=[top.logprob for top in record.top],
        token_ids=[top.token_id for top in record.top],
    )
