"""Records as bytes, on their way from a front to the observer.

Owns the format: a version byte, and the record as nested tuples of plain values in `marshal`'s own
encoding, which costs a tenth of what any other in the standard library does. A front builds those
tuples at once, without the objects that `decode_record` makes of them: it writes one for every
request, between the tokens of others. `marshal` trusts its input: both ends are processes of one
service, started from one interpreter, over a socket that is its user's alone.
"""

import io
import marshal
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from penstock.scheduler.events import Stay, Wait
from penstock.server.telemetry.request_record import (
    Content,
    RequestOptions,
    RequestRecord,
    Segment,
    SegmentKind,
    TraceParent,
)

RECORD_VERSION: Final = 3
_HEAD = bytes((RECORD_VERSION,))
_MARSHAL_VERSION = 2
"""The last that does not look whether a value has been written before: in a record few are."""
_OPTION_DIGITS = 6
"""Options travel as single-precision numbers: 0.7 would be told as 0.699999988."""

TraceValues: TypeAlias = tuple[bytes, bytes, bytes, bool | None, str]
"""As in `TraceParent`."""
OptionValues: TypeAlias = tuple[
    bool,
    bool,
    int,
    int | None,
    float | None,
    float | None,
    int | None,
    float | None,
    float | None,
    int | None,
    int,
]
"""As in `RequestOptions`, numbers as the message has them."""
WaitValues: TypeAlias = tuple[float, float, float, float, float, int]
StayValues: TypeAlias = tuple[int, int, int, int]
SegmentValues: TypeAlias = tuple[
    str, float, float, WaitValues | None, StayValues | None, int, int, bool
]
"""As in `Segment`; the kind is the value of a `SegmentKind`."""
ContentValues: TypeAlias = tuple[str, tuple[str, ...]]
RecordValues: TypeAlias = tuple[
    int,
    int,
    str,
    str,
    str,
    str,
    str,
    TraceValues,
    float,
    float,
    int,
    str,
    tuple[str, ...],
    OptionValues,
    tuple[SegmentValues, ...],
    int,
    int,
    int,
    float,
    int,
    float,
    int,
    int,
    float,
    int,
    int,
    ContentValues | None,
]
"""As in `RequestRecord`. All of it exactly of these types: no subclass, no number of numpy's."""

Types = tuple[type, ...]
_STR: Types = (str,)
_INT: Types = (int,)
_FLOAT: Types = (float,)
_BYTES: Types = (bytes,)
_BOOL: Types = (bool,)
_MAYBE_INT: Types = (int, type(None))
_MAYBE_FLOAT: Types = (float, type(None))
_TUPLE: Types = (tuple,)
_MAYBE_TUPLE: Types = (tuple, type(None))

_RECORD: tuple[Types, ...] = (
    *(_INT,) * 2,
    *(_STR,) * 5,
    _TUPLE,  # trace
    *(_FLOAT,) * 2,
    _INT,
    _STR,
    *(_TUPLE,) * 3,  # finish reasons, options, segments
    *(_INT,) * 3,
    _FLOAT,
    _INT,
    _FLOAT,
    *(_INT,) * 2,
    _FLOAT,
    *(_INT,) * 2,
    _MAYBE_TUPLE,  # content
)
_TRACE: tuple[Types, ...] = (_BYTES, _BYTES, _BYTES, (bool, type(None)), _STR)
_OPTIONS: tuple[Types, ...] = (
    _BOOL,
    _BOOL,
    _INT,
    _MAYBE_INT,
    _MAYBE_FLOAT,
    _MAYBE_FLOAT,
    _MAYBE_INT,
    _MAYBE_FLOAT,
    _MAYBE_FLOAT,
    _MAYBE_INT,
    _INT,
)
_SEGMENT: tuple[Types, ...] = (
    _STR,
    _FLOAT,
    _FLOAT,
    _MAYBE_TUPLE,
    _MAYBE_TUPLE,
    _INT,
    _INT,
    _BOOL,
)
_WAIT: tuple[Types, ...] = (*(_FLOAT,) * 5, _INT)
_STAY: tuple[Types, ...] = (_INT,) * 4
_CONTENT: tuple[Types, ...] = (_STR, _TUPLE)


def encode_record(values: RecordValues) -> bytes:
    """The record as bytes; raises ValueError where it holds something that has no place there."""
    return _HEAD + marshal.dumps(values, _MARSHAL_VERSION)


def ending_of(values: RecordValues) -> tuple[str, int, str, str]:
    """What a record counts as: method, code, reason, and its first output's finish reason."""
    finish_reasons = values[12]
    return values[3], values[10], values[11], finish_reasons[0] if finish_reasons else ""


def decode_record(data: bytes) -> RequestRecord:
    """The record behind `data`; raises ValueError where that is not exactly one."""
    if not data.startswith(_HEAD):
        raise ValueError(f"not a record of version {RECORD_VERSION}")
    stream = io.BytesIO(data)
    stream.seek(len(_HEAD))
    try:
        values = marshal.load(stream)
    except (EOFError, TypeError) as error:
        raise ValueError("the record cannot be read") from error
    if stream.read(1):
        raise ValueError("the record has more bytes than it needs")
    fields = list(_checked(values, _RECORD, "record"))
    fields[7] = TraceParent(*_checked(fields[7], _TRACE, "trace"))
    _check_all(fields[12], _STR, "finish_reasons")
    fields[13] = RequestOptions(*map(_rounded, _checked(fields[13], _OPTIONS, "options")))
    fields[14] = tuple([_segment_of(segment) for segment in fields[14]])
    fields[26] = _content_of(fields[26])
    return RequestRecord(*fields)


def _segment_of(values: object) -> Segment:
    fields = _checked(values, _SEGMENT, "segment")
    return Segment(
        SegmentKind(fields[0]),
        fields[1],
        fields[2],
        _optional(fields[3], _WAIT, "wait", _wait_of),
        _optional(fields[4], _STAY, "stay", _stay_of),
        fields[5],
        fields[6],
        fields[7],
    )


def _wait_of(values: tuple[Any, ...]) -> Wait:
    blocks_s, slots_s, token_budget_s, fairness_s, other_s, num_passed_by = values
    return Wait(
        blocks_s=blocks_s,
        slots_s=slots_s,
        token_budget_s=token_budget_s,
        fairness_s=fairness_s,
        other_s=other_s,
        num_passed_by=num_passed_by,
    )


def _stay_of(values: tuple[Any, ...]) -> Stay:
    num_chunks, num_steps, min_batch_size, max_batch_size = values
    return Stay(
        num_chunks=num_chunks,
        num_steps=num_steps,
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
    )


def _rounded(option: Any) -> Any:
    return round(option, _OPTION_DIGITS) if type(option) is float else option


def _content_of(values: object) -> Content | None:
    if values is None:
        return None
    prompt, outputs = _checked(values, _CONTENT, "content")
    _check_all(outputs, _STR, "content.outputs")
    return Content(prompt, outputs)


def _optional(
    values: object,
    types: tuple[Types, ...],
    name: str,
    make: "Callable[[tuple[Any, ...]], Any]",
) -> Any:
    return None if values is None else make(_checked(values, types, name))


def _checked(values: object, types: tuple[Types, ...], name: str) -> tuple[Any, ...]:
    """`values` if they are a tuple of exactly these types, else ValueError."""
    if type(values) is not tuple or len(values) != len(types):  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"{name} must be a tuple of {len(types)} values")
    for number, (value, allowed) in enumerate(zip(values, types, strict=True)):  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        if type(value) not in allowed:  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError(f"value {number} of {name} must be of {allowed[0].__name__}")
    return values  # pyright: ignore[reportUnknownVariableType]


def _check_all(values: tuple[object, ...], allowed: Types, name: str) -> None:
    if any(type(value) not in allowed for value in values):
        raise ValueError(f"{name} must hold {allowed[0].__name__}")
