"""Reads the options of a request: sampling, stopping, output, cache, adapter and resume.

For each group of the API there is one function. It records all invalid fields and returns the
validated options.
"""

import math
from typing import Final, Literal

from penstock.scheduler.executor import Feature
from penstock.scheduler.request import CacheRetention, SamplingParams
from penstock.server.front.errors import ErrorReason, invalid_field, request_error
from penstock.server.front.generation import (
    NO_CHUNK_LIMITS,
    ChunkLimits,
    Output,
    Resumption,
    Sampling,
    Stopping,
)
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.prompt import check_token_ids, token_array
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.tenants import MAX_PRIORITY
from penstock.v1.generation_service_pb2 import GenerateRequest
from penstock.v1.options_pb2 import CacheOptions, OutputOptions, SamplingOptions, StoppingOptions

_MAX_TEMPERATURE = 2.0
_GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy sampling. A division of logits by them would overflow, and
the result would be the most likely token in any case."""
_MAX_PENALTY = 2.0
_MAX_BIAS = 100.0
_STOP_STRINGS = "stopping.stop_strings"
_STOP_IDS = "stopping.stop_token_ids"
_MAX_CHUNK_DELAY_S: Final = 10.0
_TOKENS_PATH = "output.min_chunk_tokens"
_DELAY_PATH = "output.max_chunk_delay"
MAX_SALT_CHARS: Final = 128
MAX_SESSION_CHARS: Final = 128
_RETENTION = "cache.retention"
_SESSION = "cache.session_id"
_MAX_SCALE = 4.0
_RESUME_PATH: Final = "resume_timeout"


def read_sampling(
    options: SamplingOptions, output: OutputOptions, limits: Limits, violations: Violations
) -> Sampling:
    """Return the sampling parameters, including the numbers of logprobs from `output`. Unset fields
    get the defaults of the API."""
    has = options.HasField
    check = violations
    params = SamplingParams(
        temperature=_temperature(options, violations),
        top_k=_top_k(options, limits, violations),
        top_p=(
            check.number_above("sampling.top_p", options.top_p, 0.0, 1.0) if has("top_p") else 1.0
        ),
        min_p=check.number("sampling.min_p", options.min_p, 0.0, 1.0) if has("min_p") else 0.0,
        repetition_penalty=(
            check.number_above(
                "sampling.repetition_penalty", options.repetition_penalty, 0.0, _MAX_PENALTY
            )
            if has("repetition_penalty")
            else 1.0
        ),
        presence_penalty=_penalty("presence_penalty", options.presence_penalty, violations),
        frequency_penalty=_penalty("frequency_penalty", options.frequency_penalty, violations),
        logit_bias=_logit_bias(options, limits, violations),
        num_logprobs=_num_logprobs("logprobs", output, limits, violations),
        num_prompt_logprobs=_num_logprobs("prompt_logprobs", output, limits, violations),
    )
    _require_features(params, limits, violations)
    if has("seed"):
        _require(Feature.SEED, "sampling.seed", limits, violations)
    return Sampling(
        params=params,
        seed=options.seed if has("seed") else None,
        num_outputs=(
            check.integer(
                "sampling.num_outputs", options.num_outputs, 1, limits.config.max_num_outputs
            )
            if has("num_outputs")
            else 1
        ),
    )


def _temperature(options: SamplingOptions, violations: Violations) -> float:
    if not options.HasField("temperature"):
        return 1.0
    value = violations.number("sampling.temperature", options.temperature, 0.0, _MAX_TEMPERATURE)
    return 0.0 if value < _GREEDY_BELOW else value


def _penalty(name: str, value: float, violations: Violations) -> float:
    """Return a penalty, 0 if unset. Records a violation if it is out of range."""
    return value and violations.number(f"sampling.{name}", value, -_MAX_PENALTY, _MAX_PENALTY)


def _top_k(options: SamplingOptions, limits: Limits, violations: Violations) -> int:
    if not options.HasField("top_k"):
        return 0
    if options.top_k < 1:
        violations.add("sampling.top_k", "must be at least 1")
    # A value of at least the vocabulary size is no restriction, and may overflow the integers of
    # the batch.
    return options.top_k if options.top_k < limits.vocab_size else 0


def _logit_bias(
    options: SamplingOptions, limits: Limits, violations: Violations
) -> tuple[tuple[int, float], ...]:
    if not options.logit_bias:
        return ()
    path = "sampling.logit_bias"
    if not violations.count(path, len(options.logit_bias), limits.config.max_logit_bias):
        return ()
    biases: dict[int, float] = {}
    for index, entry in enumerate(options.logit_bias):
        if entry.token_id >= limits.vocab_size:
            violations.add(
                f"{path}[{index}].token_id",
                f"must be below {limits.vocab_size}, not {entry.token_id}",
            )
        elif entry.token_id in biases:
            violations.add(f"{path}[{index}].token_id", "is a duplicate")
        biases[entry.token_id] = violations.number(
            f"{path}[{index}].bias", entry.bias, -_MAX_BIAS, _MAX_BIAS
        )
    return tuple(biases.items())


def _num_logprobs(
    name: Literal["logprobs", "prompt_logprobs"],
    output: OutputOptions,
    limits: Limits,
    violations: Violations,
) -> int:
    if not output.HasField(name):
        return -1
    value: int = getattr(output, name)
    max_logprobs = min(limits.config.max_logprobs, limits.vocab_size)
    return violations.integer(f"output.{name}", value, 0, max_logprobs)


def _require(feature: Feature, path: str, limits: Limits, violations: Violations) -> None:
    """Record `feature` as missing for the field at `path` if the executor does not have it."""
    violations.require_feature(
        feature.value,
        path,
        is_supported=feature in limits.features,
        executor=limits.executor,
    )


def _require_features(params: SamplingParams, limits: Limits, violations: Violations) -> None:
    """Record each feature that `params` needs and the executor does not have.

    A field with its neutral value (e.g. `min_p` 0) needs no feature.
    """

    def require(feature: Feature, path: str) -> None:
        _require(feature, path, limits, violations)

    if params.min_p > 0:
        require(Feature.MIN_P, "sampling.min_p")
    if params.repetition_penalty != 1:
        require(Feature.PENALTIES, "sampling.repetition_penalty")
    if params.presence_penalty:
        require(Feature.PENALTIES, "sampling.presence_penalty")
    if params.frequency_penalty:
        require(Feature.PENALTIES, "sampling.frequency_penalty")
    if params.logit_bias:
        require(Feature.LOGIT_BIAS, "sampling.logit_bias")
    if params.num_logprobs >= 0:
        require(Feature.LOGPROBS, "output.logprobs")
    if params.num_prompt_logprobs >= 0:
        require(Feature.PROMPT_LOGPROBS, "output.prompt_logprobs")


def read_stopping(options: StoppingOptions, limits: Limits, violations: Violations) -> Stopping:
    """Return the stop conditions. max_tokens is checked against the context after tokenisation."""
    max_tokens: int | None = None
    if options.HasField("max_tokens"):
        max_tokens = violations.integer(
            "stopping.max_tokens", options.max_tokens, 1, limits.max_output_tokens
        )
    most = limits.max_output_tokens if max_tokens is None else max_tokens
    min_tokens = violations.integer("stopping.min_tokens", options.min_tokens, 0, most)
    if min_tokens:
        _require(Feature.MIN_TOKENS, "stopping.min_tokens", limits, violations)
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_strings=_stop_strings(options, limits, violations),
        stop_token_ids=_stop_token_ids(options, limits, violations),
        ignore_eos=options.ignore_eos,
        include_stop_string=options.include_stop_string,
    )


def _stop_strings(
    options: StoppingOptions, limits: Limits, violations: Violations
) -> tuple[str, ...]:
    config, num_strings = limits.config, len(options.stop_strings)
    if not num_strings or not violations.count(_STOP_STRINGS, num_strings, config.max_stop_strings):
        return ()
    for index, text in enumerate(options.stop_strings):
        path = f"{_STOP_STRINGS}[{index}]"
        violations.text_length(path, text, 1, config.max_stop_string_chars)
        num_bytes = len(text.encode())
        if num_bytes > config.max_stop_string_bytes:
            violations.add(
                path,
                f"has {num_bytes} bytes of UTF-8, at most {config.max_stop_string_bytes} are "
                "allowed",
            )
    return tuple(dict.fromkeys(options.stop_strings))


def _stop_token_ids(
    options: StoppingOptions, limits: Limits, violations: Violations
) -> tuple[int, ...]:
    ids = options.stop_token_ids
    if not ids or not violations.count(_STOP_IDS, len(ids), limits.config.max_stop_token_ids):
        return ()
    check_token_ids(token_array(ids), _STOP_IDS, limits, violations)
    return tuple(dict.fromkeys(ids))


def read_output(
    options: OutputOptions, sampling: SamplingParams, limits: Limits, violations: Violations
) -> Output:
    """Return the output options. The numbers of logprobs are copied from `sampling`."""
    return Output(
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        return_token_ids=options.return_token_ids,
        echo=options.echo,
        chunks=_read_chunks(options, limits, violations),
    )


def check_no_chunks(request: GenerateRequest) -> None:
    """Raise RequestError if an option for the size or delay of stream messages is set, because the
    response of GenerateOnce is one message."""
    violations = Violations()
    has = request.output.HasField
    for path, is_set in (
        (_TOKENS_PATH, has("min_chunk_tokens")),
        (_DELAY_PATH, has("max_chunk_delay")),
    ):
        if is_set:
            violations.add(path, "is not allowed with GenerateOnce")
    violations.raise_if_any()


def _read_chunks(options: OutputOptions, limits: Limits, violations: Violations) -> ChunkLimits:
    min_tokens, max_delay_s = NO_CHUNK_LIMITS.min_tokens, NO_CHUNK_LIMITS.max_delay_s
    if options.HasField("min_chunk_tokens"):
        min_tokens = violations.integer(
            _TOKENS_PATH, options.min_chunk_tokens, 1, limits.max_chunk_tokens
        )
    if options.HasField("max_chunk_delay"):
        max_delay_s = violations.duration_s(
            _DELAY_PATH, options.max_chunk_delay, _MAX_CHUNK_DELAY_S, can_be_zero=True
        )
    return ChunkLimits(min_tokens=min_tokens, max_delay_s=max_delay_s)


def read_salt(options: CacheOptions, violations: Violations) -> str:
    """Return the client's cache salt; empty if there is none."""
    if not options.HasField("salt"):
        return ""
    violations.text_length("cache.salt", options.salt, 1, MAX_SALT_CHARS)
    return options.salt


def read_session(options: CacheOptions, limits: Limits, violations: Violations) -> str:
    """Return the id of the session that the request continues; empty if there is none."""
    if not options.HasField("session_id"):
        return ""
    violations.require_feature("sessions", _SESSION, is_supported=limits.has_sessions)
    violations.text_length(_SESSION, options.session_id, 1, MAX_SESSION_CHARS)
    return options.session_id


def check_cache_conflicts(
    options: CacheOptions, num_prompt_logprobs: int, violations: Violations
) -> None:
    """Record `session_id` and `retention` as invalid in a request for prompt logprobs.

    Such a request adds no blocks to the prefix cache. `num_prompt_logprobs` is -1 if none are
    requested.
    """
    if num_prompt_logprobs < 0:
        return
    for path, is_set in (
        (_SESSION, options.HasField("session_id")),
        (_RETENTION, options.HasField("retention")),
    ):
        if is_set:
            violations.add(path, "cannot be combined with output.prompt_logprobs")


def read_retention(
    options: CacheOptions, max_priority: int, limits: Limits, violations: Violations
) -> CacheRetention | None:
    """Return how long and with which priority the prefix cache retains the blocks of the request;
    None if the request does not set this, so that the default of the executor applies.

    A priority above `max_priority` is lowered to it.
    """
    if not options.HasField("retention"):
        return None
    feature = Feature.CACHE_RETENTION  # The feature is also missing without prefix caching.
    violations.require_feature(feature.value, _RETENTION, is_supported=feature in limits.features)
    wanted, default = options.retention, CacheRetention()
    return CacheRetention(
        level=(
            min(
                violations.integer(f"{_RETENTION}.level", wanted.level, 0, MAX_PRIORITY),
                max_priority,
            )
            if wanted.HasField("level")
            else default.level
        ),
        duration_s=(
            violations.duration_s(f"{_RETENTION}.duration", wanted.duration)
            if wanted.HasField("duration")
            else math.inf
        ),
    )


def read_adapter(request: GenerateRequest, limits: Limits, violations: Violations) -> str:
    """Return the name of the adapter; empty if there is none. Raises RequestError
    (ADAPTER_NOT_FOUND) if the executor has no such adapter.

    No executor scales an adapter, so any scale except 1 is rejected.
    """
    if not request.HasField("adapter"):
        return ""
    if Feature.ADAPTERS not in limits.features:
        _require(Feature.ADAPTERS, "adapter", limits, violations)
        return ""
    adapter = request.adapter
    if adapter.HasField("scale"):
        scale = violations.number("adapter.scale", adapter.scale, -_MAX_SCALE, _MAX_SCALE)
        violations.require_feature("adapters", "adapter.scale", is_supported=scale == 1)
    if not adapter.name:
        violations.add("adapter.name", "must not be empty")
    elif adapter.name not in limits.adapters:
        raise request_error(ErrorReason.ADAPTER_NOT_FOUND, adapter=adapter.name)
    return adapter.name


def read_resumption(
    request: GenerateRequest, limits: Limits, violations: Violations
) -> Resumption | None:
    """Return how long the request continues without a reader, and its serialised message, with
    which another gRPC server process can resume it.

    Returns None if the request is not resumable or Resume is disabled.
    """
    if not request.HasField(_RESUME_PATH):
        return None
    max_s = limits.config.max_resume_timeout_s
    if not max_s:
        violations.require_feature("resume", _RESUME_PATH, is_supported=False)
        return None
    resume_timeout_s = violations.duration_s(_RESUME_PATH, request.resume_timeout, max_s)
    return Resumption(resume_timeout_s=resume_timeout_s, message=request.SerializeToString())


def check_not_resumable(request: GenerateRequest) -> None:
    """Raise RequestError if a resume timeout is set, because the response of GenerateOnce is one
    message."""
    if request.HasField(_RESUME_PATH):
        raise invalid_field(_RESUME_PATH, "is not allowed with GenerateOnce")
