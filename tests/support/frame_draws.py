"""Hypothesis strategies for values of inter-process messages, from the types of their fields.

Contains what the types do not express: the bounds that the values check themselves.
"""

import enum
import types
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.quotas import MAX_QUOTA, QuotaBreach
from penstock.scheduler.request import CacheRetention, Constraint, ConstraintKind, RequestSpec
from penstock.server.link.frames import TRACE_ID_BYTES, Frame, FrontHello, Submit
from penstock.server.observe.frames import ObserverFrame

KEYS = st.integers(1, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
DIGESTS = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: TEXTS,
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
}
_BOUNDED: dict[Any, dict[str, st.SearchStrategy[Any]]] = {
    FrontHello: {"front_id": st.integers(1, 2**31 - 1)},
    QuotaBreach: {"limit": st.integers(1, MAX_QUOTA)},
    CacheRetention: {
        "level": st.integers(0, 100),
        "duration_s": st.floats(min_value=0, exclude_min=True),
    },
    Constraint: {
        "kind": st.sampled_from(ConstraintKind),
        "texts": st.tuples(TEXTS.filter(bool)),
    },
    ExecutorInfo: {"pipeline_depth": st.just(1)},
    RequestSpec: {
        "key": KEYS,
        "prompt_ids": hnp.arrays(np.int32, st.integers(3, 40)),
        "max_tokens": st.integers(3, 2**40),
        "min_tokens": st.integers(0, 3),
        "num_replayed": st.integers(0, 2),
        "num_replays": st.integers(0, 9),
        "stop_ids": st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
        "block_hashes": st.lists(DIGESTS, max_size=4).map(tuple),
        "trace_id": st.sampled_from((b"", bytes(range(TRACE_ID_BYTES)))),
    },
}


def drawn(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotated type."""
    special = _SPECIAL.get(hint)
    if special is not None:
        return special()
    if hint in _PLAIN:
        return _PLAIN[hint]
    generic = _GENERIC.get(get_origin(hint))
    if generic is not None:
        return generic(*get_args(hint))
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    assert is_dataclass(hint) or issubclass(hint, (msgspec.Struct, tuple)), hint
    fields = {name: drawn(kind) for name, kind in get_type_hints(hint).items()}
    return st.builds(hint, **(fields | _BOUNDED.get(hint, {})))


def _either(*hints: Any) -> st.SearchStrategy[Any]:
    return st.one_of(*map(drawn, hints))


def _tuple_of(*hints: Any) -> st.SearchStrategy[Any]:
    if hints[1:] == (...,):
        return st.lists(drawn(hints[0]), max_size=3).map(tuple)
    return st.tuples(*map(drawn, hints))


_GENERIC: dict[Any, Callable[..., st.SearchStrategy[Any]]] = {
    Annotated: lambda hint, _: drawn(hint),
    Union: _either,
    types.UnionType: _either,
    tuple: _tuple_of,
    np.ndarray: lambda _, dtype: hnp.arrays(get_args(dtype)[0], st.integers(0, 9)),
    frozenset: lambda hint: st.frozensets(drawn(hint), max_size=3),
    dict: lambda key, value: st.dictionaries(drawn(key), drawn(value), max_size=3),
}


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    """Return submissions whose outputs share all they may, or nothing."""
    leader: RequestSpec = draw(drawn(RequestSpec))
    others: list[RequestSpec] = []
    for other in draw(st.lists(drawn(RequestSpec), max_size=2)):
        names = draw(st.sets(st.sampled_from(sorted(get_type_hints(RequestSpec)))))
        shared = {name: getattr(leader, name) for name in names}
        others.append(replace(other, **shared))
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
    """Return steps whose columns match. `keys`: of everything in them."""
    num_tokens = draw(st.integers(0, 12))
    hints = get_type_hints(StepEvents)

    def keyed(value: Any) -> Any:
        return replace(value, key=draw(keys))

    return StepEvents(
        step=draw(st.integers(0, 2**40)),
        at_s=draw(_PLAIN[float]),
        keys=draw(hnp.arrays(np.int64, num_tokens, elements=keys)),
        tokens=draw(hnp.arrays(np.int32, num_tokens)),
        logprobs=draw(st.none() | logprobs(num_tokens)),
        prompt_logprobs=tuple(
            (draw(keys), *rest[1:]) for rest in draw(drawn(hints["prompt_logprobs"]))
        ),
        changes=tuple(map(keyed, draw(drawn(hints["changes"])))),
        ends=tuple(
            # What is for the engine's log alone does not travel.
            replace(keyed(end), **{n: type(getattr(end, n))() for n in _LOGGED if hasattr(end, n)})
            for end in draw(drawn(hints["ends"]))
        ),
    )


_LOGGED = ("request_id", "trace_id", "detail")
_SPECIAL: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
    Submit: submits,
    StepEvents: steps,
    TokenLogprobs: logprobs,
}
FRAMES: st.SearchStrategy[Frame] = drawn(Frame)
OBSERVER_FRAMES: st.SearchStrategy[ObserverFrame] = drawn(ObserverFrame)
