"""The specs with which a request is resubmitted to another engine.

Owns the conversion of the first submission, and the tokens generated since, to specs with which the
next engine continues: those tokens become part of the prompt, but count as output. Pure.

Sampling is a function of seed and position, so the continuation is the one that the first engine
would have generated. Where the executor cannot continue in the middle of an output it generates
that from the start, and the tokens delivered before are compared and not delivered again.
"""

from dataclasses import replace

import numpy as np

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.executor import Feature
from penstock.scheduler.request import NO_TIME, RequestSpec
from penstock.server.front.limits import Limits
from penstock.server.front.live_request import LiveRequest, OwnOutput
from penstock.server.front.submission import Submission


def replay_specs(request: LiveRequest, limits: Limits) -> tuple[RequestSpec, ...]:
    """One spec for each output that has not ended, leader first, under the outputs' keys.

    Sets how many tokens each output repeats. Every output must lack a token at least.
    """
    submission = request.submission
    if submission is None:
        return ()
    hashes = _prompt_hashes(submission, limits)
    specs: list[RequestSpec] = []
    for output in request.outputs:
        if not output.is_live:
            continue
        spec = submission.specs[output.index]
        is_first_due = request.first_token_s == NO_TIME
        sampling = spec.sampling
        is_kept = request.generation.resumption is not None
        # The next engine has to keep the stream of a resumable request too.
        if request.head.prompt.is_delivered and not is_kept:
            sampling = replace(sampling, num_prompt_logprobs=-1)
        spec = replace(
            spec,
            key=output.key,
            # The leader may have ended.
            leader_key=specs[0].key if specs else 0,
            block_hashes=hashes,
            num_replays=request.num_replays + 1,
            ttft_deadline_s=spec.ttft_deadline_s if is_first_due else NO_TIME,
            sampling=sampling,
        )
        specs.append(_continued(spec, output, limits, is_kept=is_kept))
    return tuple(specs)


def _prompt_hashes(submission: Submission, limits: Limits) -> tuple[bytes, ...]:
    """Of the client's prompt, the same for all outputs."""
    leader = submission.specs[0]
    if not leader.hash_salt or submission.block_size == limits.block_size:
        return leader.block_hashes
    return hash_blocks(leader.prompt_ids, limits.block_size, chain_root(leader.hash_salt))


def _continued(
    spec: RequestSpec, output: OwnOutput, limits: Limits, *, is_kept: bool
) -> RequestSpec:
    """`spec`, continued after the tokens of the output so far."""
    num_tokens = len(output.token_ids)
    output.num_repeating = 0
    if not num_tokens:
        return spec
    has_logprobs = spec.sampling.num_logprobs >= 0 and Feature.SEED in limits.features
    if _must_begin_anew(spec, num_tokens, limits) or (is_kept and has_logprobs):
        # Log probabilities are not kept: a resuming client needs them again.
        output.num_repeating = num_tokens
        return spec
    prompt_ids = np.concatenate((spec.prompt_ids, np.array(output.token_ids, dtype=np.int32)))
    hashes = spec.block_hashes
    if spec.hash_salt:
        previous = hashes[-1] if hashes else chain_root(spec.hash_salt)
        rest = prompt_ids[len(hashes) * limits.block_size :]
        hashes = (*hashes, *hash_blocks(rest, limits.block_size, previous))
    return replace(spec, prompt_ids=prompt_ids, num_replayed=num_tokens, block_hashes=hashes)


def _must_begin_anew(spec: RequestSpec, num_tokens: int, limits: Limits) -> bool:
    """Whether no executor can continue the output in the middle.

    A constraint is tracked from the start of the output, and an executor may limit prompts below
    its context length.
    """
    most = limits.max_engine_prompt_tokens
    is_too_long = most is not None and spec.num_prompt_tokens + num_tokens > most
    return spec.constraint is not None or is_too_long
