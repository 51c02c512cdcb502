"""Checks and reads the numeric `OTEL_*` variables of timeouts, queues and attribute limits.

They are checked before the SDK is loaded, because the SDK reads most of them late and does not
always name the invalid one.
"""

import math
from collections.abc import Mapping, MutableMapping

QUEUE_SIZE = "OTEL_BSP_MAX_QUEUE_SIZE"
BATCH_SIZE = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
DEFAULT_QUEUE_SPANS = 2048
DEFAULT_BATCH_SPANS = 512

_SECONDS = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
_ABOVE_ZERO = (QUEUE_SIZE, BATCH_SIZE, "OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_EXPORT_TIMEOUT")
_COUNTS = (
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_SPAN_LINK_COUNT_LIMIT",
)


def check_numbers(environment: Mapping[str, str]) -> None:
    """Raise ValueError, which names the variable, if a value is not a valid number or if the batch
    size exceeds the queue size."""
    for name in _SECONDS:
        if (text := _text(environment, name)) and not _is_time(text):
            raise ValueError(f"{name} must be seconds above 0, not {text!r}")
    for name in _ABOVE_ZERO:
        _number(environment, name, least=1)
    for name in _COUNTS:
        _number(environment, name, least=0)
    max_batch_spans(environment)


def max_queue_spans(environment: Mapping[str, str]) -> int:
    """Return `OTEL_BSP_MAX_QUEUE_SIZE`, by default 2048 as in the SDK. Raises ValueError if it is
    invalid."""
    return _number(environment, QUEUE_SIZE, least=1) or DEFAULT_QUEUE_SPANS


def max_batch_spans(environment: Mapping[str, str]) -> int:
    """Return `OTEL_BSP_MAX_EXPORT_BATCH_SIZE`, by default 512 or the queue size if smaller.

    Raises ValueError if it is invalid or exceeds the queue size.
    """
    queue_spans = max_queue_spans(environment)
    batch_spans = _number(environment, BATCH_SIZE, least=1)
    if batch_spans is None:
        return min(DEFAULT_BATCH_SPANS, queue_spans)
    if batch_spans > queue_spans:
        raise ValueError(
            f"{BATCH_SIZE} must be at most {QUEUE_SIZE}, which is {queue_spans}, not {batch_spans}"
        )
    return batch_spans


def unset_blank_numbers(environment: MutableMapping[str, str]) -> None:
    """Unset numeric variables with a blank value, as the specification requires; the SDK fails on
    them."""
    for name in (*_SECONDS, *_ABOVE_ZERO, *_COUNTS):
        if name in environment and not environment[name].strip():
            del environment[name]


def _number(environment: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = _text(environment, name)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise ValueError(f"{name} must be a whole number from {least}, not {text!r}")
    return int(text)


def _text(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name, "").strip()


def _is_time(text: str) -> bool:
    try:
        duration_s = float(text)
    except ValueError:
        return False
    return duration_s > 0 and math.isfinite(duration_s)
