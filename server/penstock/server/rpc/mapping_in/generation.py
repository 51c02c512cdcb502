"""Converts GenerateRequest to `GenerationSpec`: checks all limits and reports all violations
together.

Converts one group of options after the other. Each field of the message is listed either in
MAPPED_FIELDS, or in `prompt.UNSUPPORTED_FIELDS` if it is always rejected; a test compares both
lists with the protobuf descriptor.
"""

from collections.abc import Collection
from typing import Final

from penstock.server.front.errors import CONSTRAINT_PATHS, ErrorReason, request_error
from penstock.server.front.generation import GenerationSpec, PromptInput, TokenInput, Urgency
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.constraint import read_constraint
from penstock.server.rpc.mapping_in.options import (
    check_cache_conflicts,
    read_adapter,
    read_output,
    read_resumption,
    read_retention,
    read_salt,
    read_sampling,
    read_session,
    read_stopping,
)
from penstock.server.rpc.mapping_in.prompt import (
    CHAT_PATH,
    TEXT_PATH,
    TOKENS_PATH,
    read_chat,
    read_text,
    read_token_ids,
)
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.settings.json_values import nearest
from penstock.server.tenants import MAX_PRIORITY, NO_CEILINGS, NO_TENANT, PriorityCeilings
from penstock.v1.generation_service_pb2 import GenerateRequest, ResumeRequest
from penstock.v1.options_pb2 import SchedulingOptions

MAX_ID_CHARS: Final = 128

MAPPED_FIELDS: Final[frozenset[str]] = frozenset(
    {
        "model",
        "request_id",
        "text_prompt.text",
        "text_prompt.add_special_tokens",
        "token_prompt.ids",
        "chat_prompt.messages.role",
        "chat_prompt.messages.parts.text",
        "chat_prompt.messages.name",
        "chat_prompt.messages.tool_calls.id",
        "chat_prompt.messages.tool_calls.name",
        "chat_prompt.messages.tool_calls.arguments",
        "chat_prompt.messages.tool_call_id",
        "chat_prompt.tools",
        "chat_prompt.template_arguments",
        "chat_prompt.add_generation_prompt",
        "chat_prompt.window_tokens",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.repetition_penalty",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.logit_bias.token_id",
        "sampling.logit_bias.bias",
        "sampling.seed",
        "sampling.num_outputs",
        "stopping.max_tokens",
        "stopping.min_tokens",
        "stopping.stop_strings",
        "stopping.stop_token_ids",
        "stopping.ignore_eos",
        "stopping.include_stop_string",
        "output.logprobs",
        "output.prompt_logprobs",
        "output.return_token_ids",
        "output.echo",
        "output.min_chunk_tokens",
        "output.max_chunk_delay",
        "scheduling.priority",
        "scheduling.ttft_timeout",
        "scheduling.total_timeout",
        "scheduling.time_limit",
        "cache.salt",
        "cache.session_id",
        "cache.retention.level",
        "cache.retention.duration",
        *CONSTRAINT_PATHS.values(),
        "adapter.name",
        "adapter.scale",
        "resume_timeout",
    }
)
"""All fields that have an effect, as paths without indexes."""


def read_generation(
    request: GenerateRequest,
    limits: Limits,
    model_names: Collection[str],
    *,
    tenant: str = NO_TENANT,
    ceilings: PriorityCeilings = NO_CEILINGS,
    trace_id: bytes = b"",
) -> GenerationSpec:
    """Return the validated request. `tenant` and `trace_id` are the tenant and the trace id of the
    call.

    Priorities above `ceilings` are lowered to them. Raises RequestError: MODEL_NOT_FOUND,
    ADAPTER_NOT_FOUND, INVALID_ARGUMENT (or PROMPT_TOO_LONG) with all violations, or
    FEATURE_UNSUPPORTED.
    """
    check_model(request.model if request.HasField("model") else None, model_names)
    violations = Violations()
    prompt, prompt_path = _read_prompt(request, limits, violations)
    sampling = read_sampling(request.sampling, request.output, limits, violations)
    cache = request.cache
    check_cache_conflicts(cache, sampling.params.num_prompt_logprobs, violations)
    generation = GenerationSpec(
        prompt=prompt,
        prompt_path=prompt_path,
        request_id=_read_request_id(request, violations),
        sampling=sampling,
        stopping=read_stopping(request.stopping, limits, violations),
        output=read_output(request.output, sampling.params, limits, violations),
        urgency=_read_urgency(request.scheduling, ceilings.scheduling, limits, violations),
        cache_salt=read_salt(cache, violations),
        retention=read_retention(cache, ceilings.retention, limits, violations),
        session_id=read_session(cache, limits, violations),
        constraint=read_constraint(request, limits, violations),
        adapter=read_adapter(request, limits, violations),
        resumption=read_resumption(request, limits, violations),
        tenant=tenant,
        trace_id=trace_id,
    )
    violations.raise_if_any()
    return generation


def num_lowered_priorities(request: GenerateRequest, ceilings: PriorityCeilings) -> int:
    """Return how many priorities of a request (queue, prefix cache) are above `ceilings`."""
    return (request.scheduling.priority > ceilings.scheduling) + (
        request.cache.retention.level > ceilings.retention
    )


_MAX_NAMED_CHARS = 128
"""Maximum number of characters of an unknown model name that an error message quotes."""


def check_model(name: str | None, model_names: Collection[str]) -> None:
    """Raise RequestError (MODEL_NOT_FOUND) unless `name` is the name of a served model, or None."""
    if name is not None and name not in model_names:
        shown = name[:_MAX_NAMED_CHARS]
        known = nearest(shown, model_names) or f"; available: {', '.join(sorted(model_names))}"
        message = f"model {shown!r} not found{known}"
        raise request_error(ErrorReason.MODEL_NOT_FOUND, message, model=name)


def valid_request_id(request: GenerateRequest | ResumeRequest) -> str:
    """Return the request id from the client; empty if it is missing or invalid."""
    if not request.request_id:
        return ""
    violations = Violations()
    check_request_id("request_id", request.request_id, violations)
    return "" if violations.is_any else request.request_id


def check_request_id(path: str, value: str, violations: Violations) -> None:
    """Record a violation if the id is empty, too long or not printable ASCII."""
    violations.text_length(path, value, 1, MAX_ID_CHARS)
    if (bad := next((char for char in value if not " " <= char <= "~"), None)) is not None:
        violations.add(path, f"must be printable ASCII, which {bad!a} is not")


def _read_prompt(
    request: GenerateRequest, limits: Limits, violations: Violations
) -> tuple[PromptInput, str]:
    match request.WhichOneof("prompt"):
        case "text_prompt":
            return read_text(request.text_prompt, limits, violations), TEXT_PATH
        case "token_prompt":
            ids = request.token_prompt.ids
            return read_token_ids(ids, TOKENS_PATH, limits, violations), TOKENS_PATH
        case "chat_prompt":
            return read_chat(request.chat_prompt, limits, violations), CHAT_PATH
        case _:
            violations.add("prompt", "one of text_prompt, token_prompt and chat_prompt is required")
            return TokenInput(ids=()), "prompt"


def _read_request_id(request: GenerateRequest, violations: Violations) -> str | None:
    if not request.HasField("request_id"):
        return None
    check_request_id("request_id", request.request_id, violations)
    return request.request_id


def _read_urgency(
    options: SchedulingOptions, max_priority: int, limits: Limits, violations: Violations
) -> Urgency:
    has = options.HasField
    max_s = limits.config.max_deadline_s
    return Urgency(
        priority=min(
            violations.integer(
                "scheduling.priority", options.priority, -MAX_PRIORITY, MAX_PRIORITY
            ),
            max_priority,
        ),
        ttft_deadline_s=(
            violations.duration_s("scheduling.ttft_timeout", options.ttft_timeout, max_s)
            if has("ttft_timeout")
            else None
        ),
        total_deadline_s=(
            violations.duration_s("scheduling.total_timeout", options.total_timeout, max_s)
            if has("total_timeout")
            else None
        ),
        time_limit_s=(
            violations.duration_s("scheduling.time_limit", options.time_limit)
            if has("time_limit")
            else None
        ),
    )
