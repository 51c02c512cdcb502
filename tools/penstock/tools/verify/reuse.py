"""Checks of the prefix cache: a repeated long prompt is a cache hit, without and with the options
that keep it cached.
"""

import uuid

from penstock.client import GenerationOptions
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckSkipped,
    require,
)
from penstock.tools.verify.subject import Subject
from penstock.tools.verify.transcript import Transcript

# Long enough for several blocks of any common block size.
_NUM_PROMPT_TOKENS = 512
_RETENTION, _RETENTION_S = 80, 60.0


async def _prefix_reuse(subject: Subject) -> str:
    first, second, num_tokens = await _twice(subject, {})
    num_cached = _require_cache_hit(first, second, num_tokens)
    return f"{num_cached} of {num_tokens} prompt tokens found the second time"


async def _cache_retention(subject: Subject) -> str:
    return await _kept(subject, {"retention_level": _RETENTION, "retention_s": _RETENTION_S})


async def _sessions(subject: Subject) -> str:
    return await _kept(subject, {"session_id": uuid.uuid4().hex})


async def _kept(subject: Subject, wanted: GenerationOptions) -> str:
    """Check that a request with these options is accepted and that its prompt is then a cache hit;
    return the check's result as one line.

    Whether the options keep the prompt cached longer would be visible only in a full cache.
    """
    first, second, num_tokens = await _twice(subject, wanted)
    require(
        first.num_tokens == second.num_tokens > 0,
        f"{first.num_tokens} and {second.num_tokens} tokens with {', '.join(wanted)}",
    )
    num_cached = _require_cache_hit(first, second, num_tokens)
    return f"accepted; {num_cached} of {num_tokens} prompt tokens found the second time"


async def _twice(
    subject: Subject, options: GenerationOptions
) -> tuple[Transcript, Transcript, int]:
    """Send one prompt twice, first with `options`; return both transcripts and the prompt's
    length.
    """
    if subject.is_prefix_reuse_off:
        raise CheckSkipped("prefix caching is off")
    num_tokens = min(_NUM_PROMPT_TOKENS, (subject.model.limits.max_total_tokens or 2) // 2)
    prompt = subject.token_prompt(num_tokens, seed=uuid.uuid4().hex)
    plain: GenerationOptions = {"temperature": 0.0, "max_tokens": 4, "return_token_ids": True}
    asked: GenerationOptions = {**plain, **options}
    first = await subject.generate(prompt, **asked)
    return first, await subject.generate(prompt, **plain), num_tokens


def _require_cache_hit(first: Transcript, second: Transcript, num_tokens: int) -> int:
    num_before, num_cached = _num_cached(first), _num_cached(second)
    require(
        num_cached > num_before,
        f"of {num_tokens} prompt tokens {num_before} were found the first time, {num_cached} the"
        " second time",
    )
    return num_cached


def _num_cached(transcript: Transcript) -> int:
    assert transcript.finished is not None
    return transcript.finished.usage.num_cached_prompt_tokens


CHECKS = (
    Check(name="prefix-reuse", run=_prefix_reuse, feature="token_prompt"),
    Check(name="cache-retention", run=_cache_retention, feature="cache_retention"),
    Check(name="sessions", run=_sessions, feature="sessions"),
)
