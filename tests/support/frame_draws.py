"""Frames of the link as hypothesis draws them, whatever their fields may hold."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.cache_book import CachedBlock
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Finished,
    Preempted,
    PrefixFound,
    Queued,
    Stay,
    StepEvents,
    Wait,
)
from penstock.scheduler.executor import ExecutorInfo, Feature
from penstock.scheduler.quotas import MAX_QUOTA, QuotaBreach, QuotaKind
from penstock.scheduler.request import (
    FailureReason,
    FinishReason,
    RequestSpec,
    SamplingParams,
)
from penstock.scheduler.request_options import CacheRetention, Constraint, ConstraintKind
from penstock.scheduler.state import RequestState
from penstock.server.link.cache_frames import CacheNews, Follow, SnapshotPart, Unfollow
from penstock.server.link.frames import (
    Cancel,
    CancelAnswer,
    CancelById,
    Frame,
    FrontHello,
)
from penstock.server.link.ports import EngineHello
from penstock.server.link.spec_frames import TRACE_ID_BYTES, Submit

INT32 = st.integers(-(2**31), 2**31 - 1)
NUMBERS = st.integers(0, 2**40)
FLOATS = st.floats(allow_nan=False)
KEYS = st.integers(1, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def ids(max_size: int = 40) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.int32, st.integers(1, max_size), elements=INT32)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(FLOATS),
        top_k=draw(NUMBERS),
        top_p=draw(FLOATS),
        min_p=draw(FLOATS),
        repetition_penalty=draw(FLOATS),
        presence_penalty=draw(FLOATS),
        frequency_penalty=draw(FLOATS),
        seed=draw(st.integers(0, 2**64 - 1)),
        logit_bias=tuple(draw(st.lists(st.tuples(INT32, FLOATS), max_size=4))),
        num_logprobs=draw(st.integers(-1, 20)),
        num_prompt_logprobs=draw(st.integers(-1, 20)),
    )


CONSTRAINTS = st.builds(
    Constraint,
    kind=st.just(ConstraintKind.CHOICE),
    texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=4).map(tuple),
) | st.builds(
    Constraint,
    kind=st.sampled_from(ConstraintKind),
    texts=TEXTS.filter(bool).map(lambda text: (text,)),
)
RETENTIONS = st.builds(
    CacheRetention,
    priority=st.integers(0, 100),
    duration_s=st.floats(min_value=0, exclude_min=True),
)

TRACE_IDS = st.binary(min_size=TRACE_ID_BYTES, max_size=TRACE_ID_BYTES)
COUNTS = st.integers(0, 2**32 - 1)
WAITS = st.none() | st.builds(
    Wait,
    blocks_s=FLOATS,
    slots_s=FLOATS,
    token_budget_s=FLOATS,
    fairness_s=FLOATS,
    other_s=FLOATS,
    num_passed_by=COUNTS,
)
STAYS = st.none() | st.builds(
    Stay, num_chunks=COUNTS, num_steps=COUNTS, min_batch_size=COUNTS, max_batch_size=COUNTS
)
BREACHES = st.none() | st.builds(
    QuotaBreach,
    kind=st.sampled_from(QuotaKind),
    limit=st.integers(1, MAX_QUOTA),
    retry_after_s=st.none() | FLOATS,
)


@st.composite
def specs(draw: st.DrawFn, previous: RequestSpec | None = None) -> RequestSpec:
    digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
    shares = previous is not None and draw(st.booleans())
    prompt_ids = previous.prompt_ids if previous and shares else draw(ids())
    like = previous if draw(st.booleans()) else None
    max_tokens = draw(st.integers(1, 2**40))
    return RequestSpec(
        key=draw(KEYS),
        request_id=draw(TEXTS),
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        num_replayed=draw(st.integers(0, min(len(prompt_ids), max_tokens) - 1)),
        num_replays=draw(st.integers(0, 9)),
        sampling=draw(samplings()),
        stop_ids=tuple(draw(st.lists(INT32, max_size=5))),
        block_hashes=(
            previous.block_hashes
            if previous and shares
            else tuple(draw(st.lists(digests, max_size=4)))
        ),
        hash_salt=draw(st.binary(max_size=20)),
        leader_key=draw(st.integers(0, 2**63 - 1)),
        output_index=draw(st.integers(0, 128)),
        priority=draw(INT32),
        arrival_s=draw(FLOATS),
        ttft_deadline_s=draw(FLOATS),
        deadline_s=draw(FLOATS),
        time_limit_s=draw(FLOATS),
        adapter=like.adapter if like else draw(TEXTS),
        constraint=like.constraint if like else draw(st.none() | CONSTRAINTS),
        retention=like.retention if like else draw(st.none() | RETENTIONS),
        tenant=like.tenant if like else draw(TEXTS),
        session_id=like.session_id if like else draw(TEXTS),
        trace_id=like.trace_id if like else draw(st.just(b"") | TRACE_IDS),
    )


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    made: list[RequestSpec] = []
    for _ in range(draw(st.integers(0, 3))):
        made.append(draw(specs(made[-1] if made else None)))
    return Submit(specs=tuple(made))


@st.composite
def logprobs(draw: st.DrawFn, num_rows: int) -> TokenLogprobs:
    width = draw(st.integers(0, 4))
    values = st.floats(width=32, allow_nan=False)
    return TokenLogprobs(
        chosen=draw(hnp.arrays(np.float32, num_rows, elements=values)),
        ranks=draw(hnp.arrays(np.int32, num_rows, elements=INT32)),
        top_ids=draw(hnp.arrays(np.int32, (num_rows, width), elements=INT32)),
        top_logprobs=draw(hnp.arrays(np.float32, (num_rows, width), elements=values)),
    )


@st.composite
def steps(draw: st.DrawFn, keys: st.SearchStrategy[int] = KEYS) -> StepEvents:
    num_tokens = draw(st.integers(0, 12))
    admitted = st.builds(
        Admitted,
        key=keys,
        at_s=FLOATS,
        num_cached_tokens=NUMBERS,
        num_preemptions=NUMBERS,
        wait=WAITS,
    )
    preempted = st.builds(Preempted, key=keys, at_s=FLOATS, stay=STAYS)
    found = st.builds(PrefixFound, key=keys, at_s=FLOATS, num_cached_tokens=NUMBERS)
    queued = st.builds(
        Queued, key=keys, at_s=FLOATS, num_ahead=NUMBERS, estimated_queue_s=st.none() | FLOATS
    )
    finished = st.builds(
        Finished,
        key=keys,
        at_s=FLOATS,
        reason=st.sampled_from(FinishReason),
        stop_id=INT32,
        wait=WAITS,
        stay=STAYS,
    )
    failed = st.builds(
        Failed,
        key=keys,
        at_s=FLOATS,
        reason=st.sampled_from(FailureReason),
        estimate_s=st.none() | FLOATS,
        deadline_s=st.none() | FLOATS,
        retry_after_s=st.none() | FLOATS,
        breach=BREACHES,
        wait=WAITS,
        stay=STAYS,
    )
    prompts = draw(st.lists(st.tuples(keys, NUMBERS, st.integers(0, 5)), max_size=2))
    return StepEvents(
        step=draw(NUMBERS),
        at_s=draw(FLOATS),
        keys=draw(hnp.arrays(np.int64, num_tokens, elements=keys)),
        tokens=draw(hnp.arrays(np.int32, num_tokens, elements=INT32)),
        logprobs=draw(st.none() | logprobs(num_tokens)),
        prompt_logprobs=tuple((key, first, draw(logprobs(n))) for key, first, n in prompts),
        changes=tuple(draw(st.lists(admitted | preempted | found | queued, max_size=4))),
        ends=tuple(draw(st.lists(finished | failed, max_size=4))),
    )


HELLOS = st.builds(
    EngineHello,
    epoch=NUMBERS,
    model=TEXTS,
    max_num_waiting=NUMBERS,
    max_num_waiting_tokens=NUMBERS,
    tells_cache=st.booleans(),
    executor=st.builds(
        ExecutorInfo,
        name=TEXTS,
        vocab_size=NUMBERS,
        block_size=NUMBERS,
        num_blocks=NUMBERS,
        max_seq_len=NUMBERS,
        max_num_seqs=NUMBERS,
        features=st.frozensets(st.sampled_from(Feature)),
        max_prompt_tokens=st.none() | st.integers(1, 2**40),
        adapters=st.lists(TEXTS, max_size=4).map(tuple),
        is_self_paced=st.booleans(),
    ),
).flatmap(
    lambda hello: (
        st.just(hello)
        if hello.executor.is_self_paced
        else st.builds(
            lambda depth: replace(hello, executor=replace(hello.executor, pipeline_depth=depth)),
            st.integers(1, 2),
        )
    )
)
TICKETS = st.integers(0, 2**32 - 1)
DIGESTS = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)


@st.composite
def cache_news(draw: st.DrawFn) -> CacheNews:
    num_token_bytes = 4 * draw(st.integers(1, 3))
    stored = st.builds(
        CachedBlock,
        digest=DIGESTS,
        parent=st.just(b"") | DIGESTS,
        tokens=st.binary(min_size=num_token_bytes, max_size=num_token_bytes),
    )
    return CacheNews(
        ticket=draw(TICKETS),
        changes=tuple(draw(st.lists(DIGESTS | stored, max_size=6))),
        part=draw(
            st.none()
            | st.builds(SnapshotPart, index=TICKETS, num_parts=TICKETS, num_blocks=TICKETS)
        ),
    )


FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(FrontHello, front_id=st.integers(1, 2**31 - 1)),
    HELLOS,
    submits(),
    st.builds(
        Cancel,
        keys=hnp.arrays(np.int64, st.integers(0, 9), elements=KEYS),
        reason=st.sampled_from(FinishReason),
    ),
    st.builds(CancelById, ticket=st.integers(0, 2**32 - 1), request_id=TEXTS),
    st.builds(
        CancelAnswer, ticket=st.integers(0, 2**32 - 1), state=st.sampled_from([None, *RequestState])
    ),
    steps(),
    st.builds(Follow, ticket=TICKETS, salt=st.binary(max_size=20)),
    st.builds(Unfollow, ticket=TICKETS),
    cache_news(),
)
