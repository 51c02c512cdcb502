"""The formats of trace files: each line becomes a `TraceRequest`.

A parser raises ValueError with the reason for an invalid line; its caller adds the line number.
"""

import csv
import enum
import json
import math
from collections.abc import Iterable
from datetime import datetime
from typing import Protocol, cast

from penstock.server.observe.recording.trace import (
    DEFAULT_PREFIX_BLOCK_TOKENS,
    MAX_REQUEST_TOKENS,
    TraceRequest,
)

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_RECORDED_FIELDS = {
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "tenant",
    "priority",
    "ttft_deadline_s",
    "deadline_s",
    "prefix_ids",
    "prefix_block_tokens",
}


class TraceFormat(enum.StrEnum):
    """The formats of trace files. AZURE: see AzureParser; MOONCAKE: see MooncakeParser; RECORDED:
    written by a service, see RecordedParser.
    """

    AZURE = "azure"
    MOONCAKE = "mooncake"
    RECORDED = "recorded"


class LineParser(Protocol):
    """Parses the lines of a trace file, in order."""

    def parse(self, line: str) -> TraceRequest | None:
        """Return the line's request, None for a heading. Raises ValueError with the reason."""
        ...


class AzureParser:
    """Parses the Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

    Arrival times are relative to the first row.
    """

    def __init__(self) -> None:
        self._column_of: dict[str, int] = {}
        self._first: datetime | None = None

    def parse(self, line: str) -> TraceRequest | None:
        """Return the request of a CSV row; None for the heading. Raises ValueError."""
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if not self._column_of:
            missing = [name for name in _AZURE_COLUMNS if name not in cells]
            if missing:
                raise ValueError(f"the heading lacks {', '.join(missing)}")
            self._column_of = {name: cells.index(name) for name in _AZURE_COLUMNS}
            return None
        if len(cells) <= max(self._column_of.values()):
            raise ValueError(f"{len(cells)} columns are too few")
        at = datetime.fromisoformat(cells[self._column_of["TIMESTAMP"]])
        if self._first is None:
            self._first = at
        if (at.tzinfo is None) != (self._first.tzinfo is None):
            raise ValueError("TIMESTAMP must have a time zone in every row or in none")
        return TraceRequest(
            arrival_s=_not_before_first((at - self._first).total_seconds()),
            num_prompt_tokens=_count("ContextTokens", cells[self._column_of["ContextTokens"]]),
            num_output_tokens=_count("GeneratedTokens", cells[self._column_of["GeneratedTokens"]]),
        )


class MooncakeParser:
    """Parses the Mooncake traces: JSON lines with timestamp (ms), lengths and one prefix id per 512
    prompt tokens.
    """

    def parse(self, line: str) -> TraceRequest | None:
        """Return the request of a JSON line. Raises ValueError."""
        values = json_object(line)
        arrival_s = _number(values, "timestamp") / 1e3
        num_prompt_tokens = _length("input_length", _integer(values, "input_length"))
        num_output_tokens = _length("output_length", _integer(values, "output_length"))
        hash_ids = _integers(values, "hash_ids")
        try:
            return TraceRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                prefix_ids=hash_ids,
            )
        except ValueError as error:
            raise ValueError(str(error).replace("prefix_ids", "hash_ids")) from None


class RecordedParser:
    """Parses the traces that a service records: JSON lines with the fields in
    `_RECORDED_FIELDS`.
    """

    def parse(self, line: str) -> TraceRequest | None:
        """Return the request of a JSON line. Raises ValueError."""
        values = json_object(line)
        unknown = sorted(set(values) - _RECORDED_FIELDS)
        if unknown:
            raise ValueError(f"unknown field {', '.join(unknown)}")
        tenant = values.get("tenant", "")
        if not isinstance(tenant, str):
            raise ValueError(f"tenant must be text, not {tenant!r}")
        return TraceRequest(
            arrival_s=_number(values, "arrival_s"),
            num_prompt_tokens=_length("prompt_tokens", _integer(values, "prompt_tokens")),
            num_output_tokens=_length("output_tokens", _integer(values, "output_tokens")),
            tenant=tenant,
            priority=_integer(values, "priority", 0),
            ttft_deadline_s=_number(values, "ttft_deadline_s", math.inf),
            deadline_s=_number(values, "deadline_s", math.inf),
            prefix_ids=_integers(values, "prefix_ids") if "prefix_ids" in values else (),
            prefix_block_tokens=_integer(
                values, "prefix_block_tokens", DEFAULT_PREFIX_BLOCK_TOKENS
            ),
        )


def parser_of(trace_format: TraceFormat) -> LineParser:
    """Return a new parser of this format."""
    match trace_format:
        case TraceFormat.AZURE:
            return AzureParser()
        case TraceFormat.MOONCAKE:
            return MooncakeParser()
        case TraceFormat.RECORDED:
            return RecordedParser()


def format_of(first_line: str) -> TraceFormat:
    """Detect the format of a file from its first line. Raises ValueError if it is unknown."""
    if all(name in first_line for name in _AZURE_COLUMNS):
        return TraceFormat.AZURE
    if first_line.lstrip().startswith("{"):
        values = json_object(first_line)
        if "timestamp" in values:
            return TraceFormat.MOONCAKE
        if "arrival_s" in values:
            return TraceFormat.RECORDED
    raise ValueError(f"the first line is of none of the formats {', '.join(TraceFormat)}")


def _not_before_first(seconds: float) -> float:
    if seconds < 0.0:
        raise ValueError("arrives before the first request")
    return seconds


def _count(name: str, cell: str) -> int:
    try:
        num = int(cell)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {cell!r}") from None
    return _length(name, num)


def _length(name: str, num: int) -> int:
    """Return `num`, a number of tokens, if it is in the valid range; else raise ValueError. `name`:
    the field's name in the file.
    """
    if num < 1:
        raise ValueError(f"{name} must be at least 1, not {num}")
    if num > MAX_REQUEST_TOKENS:
        raise ValueError(f"{name} must be at most {MAX_REQUEST_TOKENS}")
    return num


def json_object(line: str) -> dict[str, object]:
    """Parse a line that contains a JSON object. Raises ValueError if it does not."""
    try:
        values: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON: it is nested too deep") from None
    if not isinstance(values, dict):
        raise ValueError("must be a JSON object")
    return cast("dict[str, object]", values)


def _integer(values: dict[str, object], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if value is None:
        raise ValueError(f"{name} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return value


def _number(values: dict[str, object], name: str, default: float | None = None) -> float:
    value = values.get(name, default)
    if value is None:
        raise ValueError(f"{name} is missing")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _integers(values: dict[str, object], name: str) -> tuple[int, ...]:
    if name not in values:
        raise ValueError(f"{name} is missing")
    value = values[name]
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of whole numbers")
    items = cast("list[object]", value)
    # In Python, bool is a subclass of int.
    if not all(type(item) is int for item in items):
        raise ValueError(f"{name} must be a list of whole numbers")
    return cast("tuple[int, ...]", tuple(items))


def check_unique(name: str, items: Iterable[str]) -> None:
    """Raise ValueError if an item occurs twice. `name`: the name of the field in the error."""
    seen: set[str] = set()
    for item in items:
        if item in seen:
            raise ValueError(f"{name}: {item!r} occurs twice")
        seen.add(item)
