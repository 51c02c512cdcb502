"""SUBMIT: the outputs of one request as bytes.

Owns the layout of `RequestSpec`. Outputs of one request usually share the prompt, so a prompt that
is the very array of the output before is sent once; form, adapter, retention, tenant, session
and trace likewise.
Does not check whether a request makes sense: the front validated it.
"""

import struct
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.request import RequestSpec, SamplingParams
from penstock.scheduler.request_options import CacheRetention, Constraint, ConstraintKind
from penstock.server.link.wire import LinkError, Reader, Writer

# key, leader_key, max_tokens, min_tokens, num_replayed, num_replays, output_index, priority
_NUMBERS = struct.Struct("<qqqqqqqq")
# arrival, ttft deadline, deadline, time limit
_TIMES = struct.Struct("<dddd")
# temperature, top_p, min_p, repetition, presence, frequency
_SAMPLING_FLOATS = struct.Struct("<dddddd")
# top_k, seed, num_logprobs, num_prompt_logprobs
_SAMPLING_INTS = struct.Struct("<qQqq")

_OWN_PROMPT = 0
_PROMPT_OF_PREVIOUS = 1

# Which of the rare options follow: most requests have none, and pay one byte for them.
_HAS_ADAPTER = 1
_HAS_CONSTRAINT = 2
_HAS_RETENTION = 4
_OPTIONS_OF_PREVIOUS = 8
_HAS_TENANT = 16
_HAS_SESSION = 32
_HAS_TRACE = 64
TRACE_ID_BYTES = 16
_NO_OPTIONS = ("", None, None, "", "", b"")
_ALL_OPTIONS = (
    _HAS_ADAPTER | _HAS_CONSTRAINT | _HAS_RETENTION | _HAS_TENANT | _HAS_SESSION | _HAS_TRACE
)
_Options: TypeAlias = tuple[str, Constraint | None, CacheRetention | None, str, str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """The outputs of one request, leader first."""

    specs: tuple[RequestSpec, ...]


def write_submit(out: Writer, submit: Submit) -> None:
    """Append the body."""
    out.u32(len(submit.specs))
    previous: RequestSpec | None = None
    for spec in submit.specs:
        _write_spec(out, spec, previous)
        previous = spec


def read_submit(data: Reader) -> Submit:
    """The body's specs; a shared prompt is one array again."""
    specs: list[RequestSpec] = []
    for _ in range(data.u32()):
        specs.append(_read_spec(data, specs[-1] if specs else None))
    return Submit(specs=tuple(specs))


def _write_spec(out: Writer, spec: RequestSpec, previous: RequestSpec | None) -> None:
    out.packed(
        _NUMBERS,
        spec.key,
        spec.leader_key,
        spec.max_tokens,
        spec.min_tokens,
        spec.num_replayed,
        spec.num_replays,
        spec.output_index,
        spec.priority,
    )
    out.packed(_TIMES, spec.arrival_s, spec.ttft_deadline_s, spec.deadline_s, spec.time_limit_s)
    out.text(spec.request_id)
    out.blob(spec.hash_salt)
    _write_ints(out, spec.stop_ids)
    _write_sampling(out, spec.sampling)
    _write_options(out, spec, previous)
    if (
        previous is not None
        and spec.prompt_ids is previous.prompt_ids
        and spec.block_hashes == previous.block_hashes
    ):
        out.u8(_PROMPT_OF_PREVIOUS)
        return
    out.u8(_OWN_PROMPT)
    out.u32(len(spec.prompt_ids))
    out.array(spec.prompt_ids, np.int32)
    if any(len(digest) != DIGEST_BYTES for digest in spec.block_hashes):
        raise LinkError(f"a block hash is not {DIGEST_BYTES} bytes long")
    out.blob(b"".join(spec.block_hashes))


def _read_spec(data: Reader, previous: RequestSpec | None) -> RequestSpec:
    numbers = cast("tuple[int, ...]", data.packed(_NUMBERS))
    key, leader_key, max_tokens, min_tokens, *replays, output_index, priority = numbers
    num_replayed, num_replays = replays
    arrival_s, ttft_deadline_s, deadline_s, time_limit_s = data.packed(_TIMES)
    request_id, hash_salt = data.text(), data.blob()
    stop_ids = _read_ints(data)
    sampling = _read_sampling(data)
    adapter, constraint, retention, tenant, session_id, trace_id = _read_options(data, previous)
    prompt_ids, block_hashes = _read_prompt(data, previous)
    return RequestSpec(
        key=key,
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        num_replayed=num_replayed,
        num_replays=num_replays,
        sampling=sampling,
        stop_ids=stop_ids,
        block_hashes=block_hashes,
        hash_salt=hash_salt,
        leader_key=leader_key,
        output_index=output_index,
        priority=priority,
        arrival_s=arrival_s,
        ttft_deadline_s=ttft_deadline_s,
        deadline_s=deadline_s,
        time_limit_s=time_limit_s,
        adapter=adapter,
        constraint=constraint,
        retention=retention,
        tenant=tenant,
        session_id=session_id,
        trace_id=trace_id,
    )


def _read_prompt(
    data: Reader, previous: RequestSpec | None
) -> tuple[NDArray[np.int32], tuple[bytes, ...]]:
    origin = data.u8()
    if origin == _PROMPT_OF_PREVIOUS:
        if previous is None:
            raise LinkError("the first output of a request has no prompt")
        return previous.prompt_ids, previous.block_hashes
    if origin != _OWN_PROMPT:
        raise LinkError(f"unknown origin of a prompt: {origin}")
    prompt_ids = data.array(data.u32(), np.int32)
    hashes = data.blob()
    if len(hashes) % DIGEST_BYTES:
        raise LinkError(f"{len(hashes)} bytes of block hashes are not whole digests")
    return prompt_ids, tuple(
        hashes[start : start + DIGEST_BYTES] for start in range(0, len(hashes), DIGEST_BYTES)
    )


def _write_sampling(out: Writer, sampling: SamplingParams) -> None:
    out.packed(
        _SAMPLING_FLOATS,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    out.packed(
        _SAMPLING_INTS,
        sampling.top_k,
        sampling.seed,
        sampling.num_logprobs,
        sampling.num_prompt_logprobs,
    )
    _write_ints(out, tuple(token for token, _ in sampling.logit_bias))
    for _, bias in sampling.logit_bias:
        out.f64(bias)


def _read_sampling(data: Reader) -> SamplingParams:
    temperature, top_p, min_p, repetition, presence, frequency = data.packed(_SAMPLING_FLOATS)
    ints = cast("tuple[int, ...]", data.packed(_SAMPLING_INTS))
    top_k, seed, num_logprobs, num_prompt_logprobs = ints
    biased = _read_ints(data)
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=seed,
        logit_bias=tuple((token, data.f64()) for token in biased),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _options_of(spec: RequestSpec) -> _Options:
    return (
        spec.adapter,
        spec.constraint,
        spec.retention,
        spec.tenant,
        spec.session_id,
        spec.trace_id,
    )


def _write_options(out: Writer, spec: RequestSpec, previous: RequestSpec | None) -> None:
    options = _options_of(spec)
    if previous is not None and options != _NO_OPTIONS and options == _options_of(previous):
        out.u8(_OPTIONS_OF_PREVIOUS)
        return
    adapter, constraint, retention, tenant, session_id, trace_id = options
    out.u8(
        (_HAS_ADAPTER if adapter else 0)
        | (_HAS_CONSTRAINT if constraint else 0)
        | (_HAS_RETENTION if retention else 0)
        | (_HAS_TENANT if tenant else 0)
        | (_HAS_SESSION if session_id else 0)
        | (_HAS_TRACE if trace_id else 0)
    )
    if adapter:
        out.text(adapter)
    if constraint is not None:
        out.u8(constraint.kind)
        out.u32(len(constraint.texts))
        for text in constraint.texts:
            out.text(text)
    if retention is not None:
        out.u8(retention.priority)
        out.f64(retention.duration_s)
    if tenant:
        out.text(tenant)
    if session_id:
        out.text(session_id)
    if trace_id:
        out.blob(_checked(trace_id))


def _read_options(data: Reader, previous: RequestSpec | None) -> _Options:
    flags = data.u8()
    if flags == _OPTIONS_OF_PREVIOUS:
        if previous is None:
            raise LinkError("the first output of a request has no options to share")
        return _options_of(previous)
    if flags & ~_ALL_OPTIONS:
        raise LinkError(f"unknown options of a request: {flags}")
    adapter = data.text() if flags & _HAS_ADAPTER else ""
    constraint, retention = None, None
    if flags & _HAS_CONSTRAINT:
        kind = ConstraintKind(data.u8())
        constraint = Constraint(kind=kind, texts=tuple(data.text() for _ in range(data.u32())))
    if flags & _HAS_RETENTION:
        retention = CacheRetention(priority=data.u8(), duration_s=data.f64())
    tenant = data.text() if flags & _HAS_TENANT else ""
    session_id = data.text() if flags & _HAS_SESSION else ""
    trace_id = _checked(data.blob()) if flags & _HAS_TRACE else b""
    return adapter, constraint, retention, tenant, session_id, trace_id


def _checked(trace_id: bytes) -> bytes:
    if len(trace_id) != TRACE_ID_BYTES:
        raise LinkError(f"trace_id must be {TRACE_ID_BYTES} bytes long, not {len(trace_id)}")
    return trace_id


def _write_ints(out: Writer, values: tuple[int, ...]) -> None:
    out.u32(len(values))
    out.array(np.array(values, dtype=np.int64), np.int64)


def _read_ints(data: Reader) -> tuple[int, ...]:
    return tuple(data.array(data.u32(), np.int64).tolist())
