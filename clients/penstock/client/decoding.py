"""Converts protobuf messages to Python values.

Decodes all responses except those of OperationsService (`operations_decoding.py`). Unknown enum
values and unknown events, from a newer server, cause no error: values become UNKNOWN, events become
None.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.client.errors import StreamBroken
from penstock.client.events import (
    Accepted,
    EchoedPrompt,
    Event,
    Finished,
    FinishReason,
    Generation,
    Output,
    OutputEnd,
    Progress,
    PromptEcho,
    RequestEnd,
    RequestState,
    Timings,
    TokenRecord,
    Tokens,
    TopLogprob,
    Usage,
    WaitReason,
)
from penstock.client.model_info import (
    HealthStatus,
    KeepalivePolicy,
    Model,
    ModelLimits,
    ModelState,
)
from penstock.client.operations_values import RequestPhase

_EnumT = TypeVar(
    "_EnumT", RequestState, FinishReason, WaitReason, ModelState, HealthStatus, RequestPhase
)
_EndT = TypeVar("_EndT", bound=RequestEnd)
_PromptT = TypeVar("_PromptT", bound=EchoedPrompt)


def decode_event(response: pb.GenerateResponse) -> Event | None:
    """Convert one message of a stream; return None for an unknown event."""
    sequence = response.sequence
    match response.WhichOneof("event"):
        # Tokens are checked first, because nearly all messages are tokens.
        case "tokens":
            return _tokens(response.tokens, sequence)
        case "accepted":
            return _accepted(response.accepted, sequence)
        case "progress":
            return _progress(response.progress, sequence)
        case "finished":
            return _end(response.finished, partial(Finished, sequence=sequence))
        case "prompt":
            return _prompt(response.prompt, partial(PromptEcho, sequence=sequence))
        case _:
            return None


def decode_generation(response: pb.GenerateOnceResponse) -> Generation:
    """Convert a complete generation. Raises StreamBroken if a required part is missing."""
    if not (response.HasField("accepted") and response.HasField("finished")):
        raise StreamBroken.with_message("the response has no `accepted` or no `finished`")
    # Only messages of a stream are numbered; `accepted` is the first of every request.
    accepted = _accepted(response.accepted, 0)
    finished = _end(response.finished, RequestEnd)
    pieces = [_tokens(tokens, 0) for tokens in response.outputs]
    echo = _prompt(response.prompt, EchoedPrompt) if response.HasField("prompt") else None
    return Generation(
        accepted=accepted,
        prompt=echo,
        outputs=join_outputs(pieces, finished),
        finished=finished,
    )


def join_outputs(pieces: Iterable[Tokens], finished: RequestEnd) -> tuple[Output, ...]:
    """Join the texts and token records of each output; return the outputs in the order of
    `finished.outputs`."""
    texts: dict[int, list[str]] = {}
    records: dict[int, list[TokenRecord]] = {}
    for piece in pieces:
        texts.setdefault(piece.output_index, []).append(piece.text)
        records.setdefault(piece.output_index, []).extend(piece.records)
    return tuple(
        Output(
            index=end.output_index,
            text="".join(texts.get(end.output_index, ())),
            records=tuple(records.get(end.output_index, ())),
            end=end,
        )
        for end in finished.outputs
    )


def decode_model(message: pb.ModelInfo) -> Model:
    """Convert the description of a model. Limits that the server did not report become None."""
    ready_time = message.ready_time
    return Model(
        name=message.name,
        aliases=tuple(message.aliases),
        is_default=message.is_default,
        state=decode_enum(ModelState, message.state),
        limits=ModelLimits(**_optional_fields(message.limits, ModelLimits)),
        keepalive=KeepalivePolicy(**_optional_fields(message.limits.keepalive, KeepalivePolicy)),
        features=tuple((name.name, value) for name, value in message.features.ListFields()),
        adapters=tuple(message.adapters),
        executor=message.executor,
        quantization=message.quantization,
        kv_cache_dtype=message.kv_cache_dtype,
        ready_at_s=ready_time.ToNanoseconds() / 1e9 if message.HasField("ready_time") else None,
    )


def decode_state(value: int) -> RequestState:
    """Convert the number of a request's state. An unknown number becomes UNKNOWN."""
    return decode_enum(RequestState, value)


def decode_health(value: int) -> HealthStatus:
    """Convert the number of a serving status of grpc.health.v1. An unknown one becomes UNKNOWN."""
    return decode_enum(HealthStatus, value)


def decode_usage(message: pb.TokenUsage) -> Usage:
    """Convert the token counts of a request."""
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_completion_tokens=message.num_completion_tokens,
        num_cached_prompt_tokens=message.num_cached_prompt_tokens,
    )


def decode_timings(message: pb.RequestTimings) -> Timings:
    """Convert the durations of a request's phases to seconds. An unset `ttft_duration` becomes
    None."""
    return Timings(
        queue_s=decode_seconds(message.queue_duration),
        prefill_s=decode_seconds(message.prefill_duration),
        ttft_s=decode_optional_s(message, "ttft_duration"),
        decode_s=decode_seconds(message.decode_duration),
        total_s=decode_seconds(message.total_duration),
    )


def _accepted(message: pb.RequestAccepted, sequence: int) -> Accepted:
    return Accepted(
        sequence=sequence,
        request_id=message.request_id,
        model=message.model,
        num_prompt_tokens=message.num_prompt_tokens,
        seed=message.seed,
        estimated_queue_s=decode_optional_s(message, "estimated_queue_duration"),
        num_dropped_messages=message.num_dropped_messages,
        trace_id=message.trace_id,
    )


def _progress(message: pb.RequestProgress, sequence: int) -> Progress:
    has_position = message.HasField("queue_position")
    return Progress(
        sequence=sequence,
        state=decode_state(message.state),
        queue_position=message.queue_position if has_position else None,
        wait_reason=decode_enum(WaitReason, message.wait_reason),
        num_cached_prompt_tokens=message.num_cached_prompt_tokens,
        num_preemptions=message.num_preemptions,
        queue_s=decode_seconds(message.queue_duration),
        estimated_queue_s=decode_optional_s(message, "estimated_queue_duration"),
    )


def _prompt(message: pb.PromptEcho, kind: Callable[..., _PromptT]) -> _PromptT:
    return kind(text=message.text, records=_records(message.records))


def _tokens(message: pb.TokenDelta, sequence: int) -> Tokens:
    records = message.records
    return Tokens(
        sequence=sequence,
        output_index=message.output_index,
        text=message.text,
        records=_records(records) if records else (),
        num_tokens=message.num_tokens,
    )


def _records(messages: Iterable[pb.TokenRecord]) -> tuple[TokenRecord, ...]:
    return tuple(
        TokenRecord(
            id=message.id,
            logprob=message.logprob if message.HasField("logprob") else None,
            rank=message.rank if message.HasField("rank") else None,
            top_logprobs=tuple(
                TopLogprob(
                    id=top.id,
                    logprob=top.logprob,
                    token_bytes=top.token_bytes if top.HasField("token_bytes") else None,
                )
                for top in message.top_logprobs
            ),
            token_bytes=message.token_bytes if message.HasField("token_bytes") else None,
        )
        for message in messages
    )


def _end(message: pb.RequestFinished, kind: Callable[..., _EndT]) -> _EndT:
    return kind(
        outputs=tuple(_output_end(end) for end in message.outputs),
        usage=decode_usage(message.usage),
        timings=decode_timings(message.timings),
        num_preemptions=message.num_preemptions,
    )


def _output_end(message: pb.OutputEnd) -> OutputEnd:
    matched = message.WhichOneof("matched_stop")
    return OutputEnd(
        output_index=message.output_index,
        finish_reason=decode_enum(FinishReason, message.finish_reason),
        stop_string=message.stop_string if matched == "stop_string" else None,
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        num_completion_tokens=message.num_completion_tokens,
    )


def decode_enum(kind: type[_EnumT], value: int) -> _EnumT:
    """Convert a protobuf enum number to `kind`. An unknown number becomes UNKNOWN."""
    try:
        return kind(value)
    except ValueError:
        return kind.UNKNOWN


def decode_seconds(duration: Duration) -> float:
    """Convert a protobuf Duration to seconds."""
    return duration.ToNanoseconds() / 1e9


def decode_optional_s(message: Message, name: str) -> float | None:
    """Convert the Duration in the field `name` to seconds; return None if it is not set."""
    return decode_seconds(getattr(message, name)) if message.HasField(name) else None


def _optional_fields(message: Message, kind: type[Any]) -> dict[str, Any]:
    """Return the fields that are set in `message`, as keyword arguments of the dataclass `kind`.

    A Duration becomes seconds, under its name with the suffix `_s`. Fields that `kind` does not
    have are left out.
    """
    known = {option.name for option in fields(kind)}
    values: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if isinstance(value, Duration):
            name, value = f"{name}_s", decode_seconds(value)
        if name in known:
            values[name] = value
    return values
