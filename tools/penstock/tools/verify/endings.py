"""Checks of requests that do not run to their end: cancelled, disconnected, past a deadline, or
rejected.
"""

from collections.abc import Mapping

from penstock.client import (
    Adapter,
    CallCancelled,
    ChatMessage,
    ChatPrompt,
    ChoiceConstraint,
    DeadlineExceeded,
    FinishReason,
    GenerationOptions,
    GrammarConstraint,
    Image,
    InvalidArgument,
    JsonSchemaConstraint,
    RegexConstraint,
    RequestNotFound,
    RequestState,
    Tokens,
    Unimplemented,
)
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckFailed,
    CheckSkipped,
    require,
)
from penstock.tools.verify.subject import Subject
from penstock.tools.verify.transcript import Transcript

_LONG_TOKENS = 4096
_DEADLINE_S = 0.02
_MAX_PROMPT_IDS = 2_000_000
_TINY_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)
# For each optional feature, options that use it; FEATURE_PROMPTS has the prompt if one is needed.
FEATURE_OPTIONS: Mapping[str, GenerationOptions] = {
    "json_schema": {"constraint": JsonSchemaConstraint(schema="{}")},
    "regex": {"constraint": RegexConstraint(pattern="[a-z]+")},
    "grammar": {"constraint": GrammarConstraint(ebnf='root ::= "yes"')},
    "choice": {"constraint": ChoiceConstraint(choices=("yes", "no"))},
    "images": {},
    "tools": {},
    "adapters": {"adapter": Adapter(name="none-of-this-name")},
    "sessions": {"session_id": "verify"},
    "cache_retention": {"retention_level": 50},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "min_p": {"min_p": 0.5, "temperature": 1.0},
    "penalties": {"repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {1: 1.0}},
    "logprobs": {"logprobs": 0},
    "min_tokens": {"min_tokens": 2},
    "seed": {"seed": 7},
}

FEATURE_PROMPTS: Mapping[str, ChatPrompt] = {
    "images": ChatPrompt(
        messages=(ChatMessage("user", (Image(data=_TINY_PNG, mime_type="image/png"),)),)
    ),
    "tools": ChatPrompt(messages=(ChatMessage("user", "Hi"),), tools=({"type": "function"},)),
}


def _long_output(subject: Subject) -> GenerationOptions:
    """Return options for a long output, at most 4096 tokens, so that the request can be
    interrupted.
    """
    return {
        "temperature": 0.0,
        "max_tokens": subject.clamp_output_tokens(_LONG_TOKENS),
        "ignore_eos": True,
    }


async def _cancel(subject: Subject) -> str:
    transcript, stood = Transcript(), None
    try:
        async with subject.streaming(None, transcript, **_long_output(subject)) as events:
            async for event in events:
                if isinstance(event, Tokens) and stood is None and transcript.accepted is not None:
                    stood = await subject.client.cancel(transcript.accepted.request_id)
    except RequestNotFound as error:
        raise CheckSkipped("the request ended before it could be cancelled") from error
    except CallCancelled as error:
        raise CheckFailed("the stream ended with CANCELLED instead of `finished`") from error
    reason = transcript.end.finish_reason
    if reason is FinishReason.LENGTH and stood in (None, RequestState.COMPLETED):
        raise CheckSkipped("the request ended before it could be cancelled")
    require(
        stood is RequestState.PROCESSING,
        f"Cancel returned state {stood.name if stood is not None else 'none'}",
    )
    require(reason is FinishReason.CANCELLED, f"ended by {reason.name}")
    await _still_serves(subject)
    return f"cancelled after {transcript.num_tokens} tokens, the next request runs"


async def _disconnect(subject: Subject) -> str:
    transcript = Transcript()
    async with subject.streaming(None, transcript, **_long_output(subject)) as events:
        async for event in events:
            if isinstance(event, Tokens):
                break
    await _still_serves(subject)
    return f"disconnected after {transcript.num_tokens} tokens, the next request runs"


async def _still_serves(subject: Subject) -> None:
    transcript = await subject.greedy(4)
    require(transcript.num_tokens > 0, "the next request had no tokens")


async def _deadline(subject: Subject) -> str:
    try:
        wanted: GenerationOptions = {**_long_output(subject), "total_timeout_s": _DEADLINE_S}
        await subject.generate(**wanted)
    except DeadlineExceeded as error:
        known = {"phase", "deadline", "estimate_ms"} & error.metadata.keys()
        require(bool(error.reason and known), f"DEADLINE_EXCEEDED lacks the phase: {error}")
        where = error.metadata.get("phase", "admission")
        await _still_serves(subject)
        return f"{error.reason} in {where}, the next request runs"
    raise CheckSkipped(f"the whole output was generated within {_DEADLINE_S * 1e3:.0f} ms")


async def _unsupported(subject: Subject) -> str:
    asked: list[str] = []
    for feature, options in FEATURE_OPTIONS.items():
        if subject.model.supports(feature) is not False:
            continue
        asked.append(feature)
        try:
            wanted: GenerationOptions = {"max_tokens": 4, **options}
            await subject.generate(FEATURE_PROMPTS.get(feature), **wanted)
        except Unimplemented as error:
            named = error.metadata.get("feature", "")
            require(named == feature, f"{feature} was rejected as {named!r}")
        else:
            raise CheckFailed(f"{feature} is not offered, but was accepted")
    if not asked:
        raise CheckSkipped("the model offers every feature")
    return f"rejected by name: {', '.join(asked)}"


async def _too_long(subject: Subject) -> str:
    limits = subject.model.limits
    num_ids = min(limits.max_prompt_tokens or 0, limits.max_total_tokens or 0) + 1
    if num_ids > _MAX_PROMPT_IDS:
        raise CheckSkipped(f"a prompt of {num_ids} tokens exceeds the message size limit")
    try:
        await subject.generate(subject.token_prompt(num_ids, seed="too long"), max_tokens=1)
    except InvalidArgument as error:
        fields = [violation.field for violation in error.field_violations]
        require(bool(fields), f"the error names no field: {error}")
        await _still_serves(subject)
        return f"{num_ids} tokens: {error.reason}, field {fields[0]}"
    raise CheckFailed(f"a prompt of {num_ids} tokens was accepted")


CHECKS = (
    Check(name="cancel", run=_cancel),
    Check(name="leave", run=_disconnect),
    Check(name="deadline", run=_deadline, feature="timeouts"),
    Check(name="unsupported", run=_unsupported),
    Check(name="too-long", run=_too_long, feature="token_prompt"),
)
