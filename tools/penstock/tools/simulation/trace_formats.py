"""The formats of trace files: each line becomes a `TraceRequest`.

A parser raises ValueError with the reason for an invalid line; its caller adds the line number.
"""

import csv
import enum
from collections.abc import Iterable
from datetime import datetime
from typing import Protocol, TypeVar

import msgspec

from penstock.server.observe.recording.trace import TraceRequest, check_length

T = TypeVar("T")

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


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


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class MooncakeParser:
    """Parses the Mooncake traces: JSON lines with timestamp (ms), lengths and one prefix id per 512
    prompt tokens.
    """

    _decoder = msgspec.json.Decoder(_MooncakeLine)

    def parse(self, line: str) -> TraceRequest | None:
        """Return the request of a JSON line. Raises ValueError."""
        read = decoded(self._decoder, line)
        check_length("input_length", read.input_length)
        check_length("output_length", read.output_length)
        try:
            return TraceRequest(
                arrival_s=read.timestamp / 1e3,
                num_prompt_tokens=read.input_length,
                num_output_tokens=read.output_length,
                prefix_ids=read.hash_ids,
            )
        except ValueError as error:
            raise ValueError(str(error).replace("prefix_ids", "hash_ids")) from None


class RecordedParser:
    """Parses the traces that a service records: JSON lines with the fields of `TraceRequest`."""

    _decoder = msgspec.json.Decoder(TraceRequest)

    def parse(self, line: str) -> TraceRequest | None:
        """Return the request of a JSON line. Raises ValueError."""
        return decoded(self._decoder, line)


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
    if '"timestamp"' in first_line:
        return TraceFormat.MOONCAKE
    if '"arrival_s"' in first_line:
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
    check_length(name, num)
    return num


def decoded(decoder: msgspec.json.Decoder[T], line: str) -> T:
    """Decode a line of JSON. Raises ValueError with the reason."""
    try:
        return decoder.decode(line)
    except RecursionError:
        raise ValueError("not JSON: it is nested too deep") from None
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


def check_unique(name: str, items: Iterable[str]) -> None:
    """Raise ValueError if an item occurs twice. `name`: the name of the field in the error."""
    seen: set[str] = set()
    for item in items:
        if item in seen:
            raise ValueError(f"{name}: {item!r} occurs twice")
        seen.add(item)
