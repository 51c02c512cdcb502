"""Hypothesis strategies for inter-process messages, inferred from the types of their fields.

Some classes also check bounds that types do not express; `register` declares these.
"""

from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.quotas import MAX_QUOTA, QuotaBreach
from penstock.scheduler.request import CacheRetention, Constraint, ConstraintKind, RequestSpec
from penstock.server.ipc.frames import TRACE_ID_BYTES, Cancel, Frame, FrontHello, Submit
from penstock.server.ipc.step_frames import StepFrame
from penstock.server.observe.frames import Heartbeat

KEYS = st.integers(1, 2**63 - 1)


def register(kind: type[Any], /, **fields: st.SearchStrategy[Any]) -> None:
    """Register a class: the named fields are drawn from these strategies, the others by their
    types.
    """
    inferred = dict.fromkeys(get_type_hints(kind), ...)
    st.register_type_strategy(kind, st.builds(kind, **(inferred | fields)))


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    return st.from_type(kind)


st.register_type_strategy(int, st.integers(-(2**63), 2**64 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))
register(Cancel, keys=hnp.arrays(np.int64, st.integers(0, 9)))
register(Heartbeat)
register(FrontHello, front_id=st.integers(1, 2**31 - 1))
register(QuotaBreach, limit=st.integers(1, MAX_QUOTA))
register(
    CacheRetention, level=st.integers(0, 100), duration_s=st.floats(min_value=0, exclude_min=True)
)
register(
    Constraint,
    kind=st.sampled_from(ConstraintKind),
    texts=st.tuples(st.text(min_size=1, max_size=20)),
)
register(ExecutorInfo, pipeline_depth=st.just(1))
register(
    RequestSpec,
    key=KEYS,
    prompt_ids=hnp.arrays(np.int32, st.integers(3, 40)),
    max_tokens=st.integers(3, 2**40),
    min_tokens=st.integers(0, 3),
    num_replayed=st.integers(0, 2),
    num_replays=st.integers(0, 9),
    stop_ids=st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
    block_hashes=st.lists(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES), max_size=4).map(
        tuple
    ),
    trace_id=st.sampled_from((b"", bytes(range(TRACE_ID_BYTES)))),
)


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    """Return submissions of one to three outputs, whose specs share any subset of their fields."""
    leader = draw(st.from_type(RequestSpec))
    others: list[RequestSpec] = []
    for other in draw(st.lists(st.from_type(RequestSpec), max_size=2)):
        names = draw(st.sets(st.sampled_from(sorted(get_type_hints(RequestSpec)))))
        others.append(replace(other, **{name: getattr(leader, name) for name in names}))
    return Submit(specs=(leader, *others))


@st.composite
def logprobs(draw: st.DrawFn, num_rows: int | None = None) -> TokenLogprobs:
    num = draw(st.integers(0, 5)) if num_rows is None else num_rows
    num_top = draw(st.integers(0, 4))
    values = st.floats(width=32, allow_nan=False)
    return TokenLogprobs(
        chosen=draw(hnp.arrays(np.float32, num, elements=values)),
        ranks=draw(hnp.arrays(np.int32, num)),
        top_ids=draw(hnp.arrays(np.int32, (num, num_top))),
        top_logprobs=draw(hnp.arrays(np.float32, (num, num_top), elements=values)),
    )


@st.composite
def steps(draw: st.DrawFn, keys: st.SearchStrategy[int] = KEYS) -> StepEvents:
    """Return steps whose arrays have matching lengths. `keys`: strategy for the request keys."""
    num_tokens = draw(st.integers(0, 12))
    hints = get_type_hints(StepEvents)

    def keyed(name: str) -> list[Any]:
        return [replace(value, key=draw(keys)) for value in draw(st.from_type(hints[name]))]

    return StepEvents(
        step=draw(st.integers(0, 2**40)),
        at_s=draw(st.from_type(float)),
        keys=draw(hnp.arrays(np.int64, num_tokens, elements=keys)),
        tokens=draw(hnp.arrays(np.int32, num_tokens)),
        logprobs=draw(st.none() | logprobs(num_tokens)),
        prompt_logprobs=tuple(
            (draw(keys), *rest[1:]) for rest in draw(st.from_type(hints["prompt_logprobs"]))
        ),
        changes=tuple(keyed("changes")),
        ends=tuple(
            # Fields that only the engine logs are not sent.
            replace(end, **{n: type(getattr(end, n))() for n in _LOGGED if hasattr(end, n)})
            for end in keyed("ends")
        ),
    )


_LOGGED = ("request_id", "trace_id", "detail")
st.register_type_strategy(Submit, submits())
st.register_type_strategy(StepEvents, steps())
st.register_type_strategy(StepFrame, steps().map(StepFrame.from_events))
st.register_type_strategy(TokenLogprobs, logprobs())
FRAMES: st.SearchStrategy[Frame] = drawn(Frame)
