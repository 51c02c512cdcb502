"""What another engine is given of a request that lost its own.

Owns the step from what the first engine was given, and the tokens that came of it, to the
specs with which the next one goes on as if nothing had happened: those tokens are a part of the
prompt, though they count as output. Pure.

Sampling is a function of seed and position, so the continuation is the one that the first engine
would have made. Where the executor cannot go on in the middle of an output it generates that from
the start, and what was told before is compared and not told again.
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

    Sets what each output has to hear again. Every one of them must lack a token at least.
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
        # Of one that is kept the next engine has to keep it too.
        if request.head.prompt.is_delivered and not is_kept:
            sampling = replace(sampling, num_prompt_logprobs=-1)
        spec = replace(
            spec,
            key=output.key,
            # Whoever led may have ended.
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
    """`spec`, which begins the output, going on after what came of it."""
    num_tokens = len(output.token_ids)
    output.num_repeating = 0
    if not num_tokens:
        return spec
    has_logprobs = spec.sampling.num_logprobs >= 0 and Feature.SEED in limits.features
    if _must_begin_anew(spec, num_tokens, limits) or (is_kept and has_logprobs):
        # Log probabilities are not kept here: whoever resumes it wants them again.
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
    """Whether no executor can take the output up in its middle.

    A form is followed from its beginning, and an engine may take shorter prompts than its context.
    """
    most = limits.max_engine_prompt_tokens
    is_too_long = most is not None and spec.num_prompt_tokens + num_tokens > most
    return spec.constraint is not None or is_too_long
