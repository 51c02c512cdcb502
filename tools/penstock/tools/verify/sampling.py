"""Checks of sampling: seeds, log probabilities of output and prompt, logit bias, several
outputs.
"""

from penstock.client import TokenRecord
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckSkipped,
    require,
)
from penstock.tools.verify.subject import Subject
from penstock.tools.verify.transcript import Transcript

_NUM_TOKENS = 16
_SEEDS = (11, 12, 13)
# A temperature high enough that seeds give different tokens even for a peaked distribution.
_WARM = 1.5
_NUM_TOP = 2
# Slightly above zero, because of rounding.
_MAX_LOGPROB = 1e-5
_CLOSE = 1e-3


async def _seed(subject: Subject) -> str:
    async def sampled(seed: int) -> list[int]:
        return (await subject.greedy(_NUM_TOKENS, temperature=_WARM, seed=seed)).ids()

    texts = [await sampled(seed) for seed in _SEEDS]
    again = await sampled(_SEEDS[0])
    require(again == texts[0], f"seed {_SEEDS[0]} gave different tokens the second time")
    require(
        any(text != texts[0] for text in texts),
        f"seeds {_SEEDS} all gave the same {_NUM_TOKENS} tokens",
    )
    return f"seed {_SEEDS[0]} repeats, others differ"


async def _logprobs(subject: Subject) -> str:
    num_top = min(_NUM_TOP, subject.model.limits.max_logprobs or 0)
    transcript = await subject.greedy(_NUM_TOKENS, logprobs=num_top)
    records = transcript.records()
    require(
        len(records) == transcript.num_tokens > 0,
        f"{len(records)} records for {transcript.num_tokens} tokens",
    )
    for record in records:
        _require_logprob(record, num_top)
    chosen = records[0].logprob or 0.0
    best = max((top.logprob for top in records[0].top_logprobs), default=chosen)
    require(
        abs(best - chosen) < _CLOSE, f"the greedy token has {chosen:.4f}, the best one {best:.4f}"
    )
    return f"{len(records)} tokens with {num_top} alternatives each"


def _require_logprob(record: TokenRecord, num_top: int) -> None:
    logprob = record.logprob
    require(logprob is not None and logprob <= _MAX_LOGPROB, f"a logprob of {logprob}")
    require(
        len(record.top_logprobs) == num_top,
        f"{len(record.top_logprobs)} alternatives instead of {num_top}",
    )
    values = [top.logprob for top in record.top_logprobs]
    require(values == sorted(values, reverse=True), "alternatives are not best first")


async def _prompt_logprobs(subject: Subject) -> str:
    transcript = await subject.greedy(2, prompt_logprobs=0)
    records, accepted = transcript.prompt_records, transcript.accepted
    assert accepted is not None
    require(
        len(records) == accepted.num_prompt_tokens,
        f"{len(records)} records for {accepted.num_prompt_tokens} prompt tokens",
    )
    require(records[0].logprob is None, "the first token of a prompt cannot have a logprob")
    for record in records[1:]:
        _require_logprob(record, 0)
    return f"{len(records)} prompt tokens"


async def _logit_bias(subject: Subject) -> str:
    unlikely = subject.vocab_size // 2
    free = (await subject.greedy(4)).ids()
    while unlikely in free:
        unlikely += 1
    forced = (await subject.greedy(4, logit_bias={unlikely: 100.0})).ids()
    require(forced == [unlikely] * len(forced), f"token {unlikely} was to be forced, got {forced}")
    banned = (await subject.greedy(4, logit_bias={free[0]: -100.0})).ids()
    require(free[0] not in banned, f"token {free[0]} was banned but was generated")
    return f"token {unlikely} forced, token {free[0]} banned"


async def _outputs(subject: Subject) -> str:
    num = min(3, subject.model.limits.max_num_outputs or 1)
    if num < 2:
        raise CheckSkipped("the service allows one output")
    transcript: Transcript = await subject.greedy(_NUM_TOKENS, temperature=_WARM, n=num)
    finished = transcript.finished
    assert finished is not None
    indexes = [end.output_index for end in finished.outputs]
    require(indexes == list(range(num)), f"outputs {indexes} instead of {num}")
    for end in finished.outputs:
        ids = transcript.ids(end.output_index)
        require(
            len(ids) == end.num_completion_tokens,
            f"output {end.output_index}: {len(ids)} tokens of {end.num_completion_tokens}",
        )
    different = {tuple(transcript.ids(index)) for index in indexes}
    require(len(different) > 1, f"{num} outputs, all the same")
    return f"{num} outputs, {len(different)} different"


CHECKS = (
    Check(name="seed", run=_seed, feature="seed"),
    Check(name="logprobs", run=_logprobs, feature="logprobs"),
    Check(name="prompt-logprobs", run=_prompt_logprobs, feature="prompt_logprobs"),
    Check(name="logit-bias", run=_logit_bias, feature="logit_bias"),
    Check(name="outputs", run=_outputs, feature="multiple_outputs"),
)
