"""The check of prefix reuse: a long prompt that comes again is not computed again."""

import uuid

from penstock.server.cli.verify_checks.check import Check
from penstock.server.cli.verify_checks.subject import Subject
from penstock.server.cli.verify_checks.transcript import Transcript
from penstock.server.cli.verify_checks.verdict import (
    CheckSkipped,
    require,
)

# Several blocks at every block size in use.
_NUM_PROMPT_TOKENS = 512


async def _prefix_reuse(subject: Subject) -> str:
    if subject.is_prefix_reuse_off:
        raise CheckSkipped("prefix caching is off")
    num_tokens = min(_NUM_PROMPT_TOKENS, (subject.model.limits.max_total_tokens or 2) // 2)
    prompt = subject.token_prompt(num_tokens, seed=uuid.uuid4().hex)
    first, second = [
        await subject.generate(prompt, temperature=0.0, max_tokens=4, return_token_ids=True)
        for _ in range(2)
    ]
    num_before, num_cached = _num_cached(first), _num_cached(second)
    require(
        num_cached > num_before,
        f"of {num_tokens} prompt tokens {num_before} were found the first time, {num_cached} the"
        " second time",
    )
    return f"{num_cached} of {num_tokens} prompt tokens found the second time"


def _num_cached(transcript: Transcript) -> int:
    assert transcript.finished is not None
    return transcript.finished.usage.num_cached_prompt_tokens


CHECKS = (Check(name="prefix-reuse", run=_prefix_reuse, feature="token_prompt"),)
