"""Requests of a trace, with no text and no token ids, and the formats of trace files.

Owns the value that every format is read into, and one line of each format. Does not open files and
does not know line numbers: a parser raises ValueError with the reason, and its reader says where.
"""

import csv
import enum
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, cast

MAX_PREFIX_ID = 2**62
MAX_REQUEST_TOKENS = 2**24
"""Of a prompt or an output: some hundred times the longest context that models have."""
MAX_ARRIVAL_S = 1e10
"""Beyond three centuries floats no longer tell the microseconds of a step apart."""
MAX_PRIORITY = 2**31 - 1
DEFAULT_PREFIX_BLOCK_TOKENS = 512
"""Tokens that one prefix id stands for, as in the Mooncake traces."""


class TraceError(ValueError):
    """A trace cannot be read; the message says where and why."""


def check_text(name: str, text: str) -> None:
    """Raise ValueError naming the field for what no file and no terminal can be given."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be Unicode text, not {text!a}") from None


def check_unique(name: str, items: Iterable[str]) -> None:
    """Raise ValueError naming the field for a name that is there twice."""
    seen: set[str] = set()
    for item in items:
        if item in seen:
            raise ValueError(f"{name}: {item!r} is there twice")
        seen.add(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Raises ValueError naming the field that is off.

    `arrival_s`: since the start of the trace. `num_output_tokens`: what it really generated.
    `ttft_deadline_s`, `deadline_s`: seconds after the arrival, infinite for none. Higher `priority`
    is more urgent.

    `prefix_ids`: what the prompt has in common with others, one id for each started block of
    `prefix_block_tokens` tokens, empty where unknown. An id names its block and everything before
    it: two prompts that share an id share all that precedes it.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0
    ttft_deadline_s: float = math.inf
    deadline_s: float = math.inf
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = DEFAULT_PREFIX_BLOCK_TOKENS

    def __post_init__(self) -> None:
        self._check_numbers()
        # Nearly all traces tell no tenants apart.
        if self.tenant:
            check_text("tenant", self.tenant)
        if self.prefix_ids:
            self._check_prefix_ids()

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0.0):
            raise ValueError(f"arrival_s must be finite and not negative, not {self.arrival_s}")
        if self.arrival_s > MAX_ARRIVAL_S:
            raise ValueError(f"arrival_s must be at most {MAX_ARRIVAL_S:g}, not {self.arrival_s:g}")
        for name in ("num_prompt_tokens", "num_output_tokens", "prefix_block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
            if getattr(self, name) > MAX_REQUEST_TOKENS:
                raise ValueError(f"{name} must be at most {MAX_REQUEST_TOKENS}")
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be in {-MAX_PRIORITY} .. {MAX_PRIORITY}")
        for name in ("ttft_deadline_s", "deadline_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")

    def _check_prefix_ids(self) -> None:
        num_blocks = -(-self.num_prompt_tokens // self.prefix_block_tokens)
        if len(self.prefix_ids) != num_blocks:
            raise ValueError(
                f"prefix_ids must hold {num_blocks} ids for {self.num_prompt_tokens} tokens in"
                f" blocks of {self.prefix_block_tokens}, not {len(self.prefix_ids)}"
            )
        if min(self.prefix_ids) < 0 or max(self.prefix_ids) >= MAX_PREFIX_ID:
            raise ValueError(f"prefix_ids must be in 0 .. {MAX_PREFIX_ID - 1}")


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
    """The formats that can be read."""

    AZURE = "azure"
    MOONCAKE = "mooncake"
    RECORDED = "recorded"


class LineParser(Protocol):
    """Reads lines in order."""

    def parse(self, line: str) -> TraceRequest | None:
        """The line's request, None for a heading. Raises ValueError with the reason."""
        ...


class AzureParser:
    """The Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

    Times count from the first row.
    """

    def __init__(self) -> None:
        self._column_of: dict[str, int] = {}
        self._first: datetime | None = None

    def parse(self, line: str) -> TraceRequest | None:
        """See `LineParser`."""
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
    """The Mooncake traces: JSON lines with timestamp (ms), lengths and one id per 512 tokens."""

    def parse(self, line: str) -> TraceRequest | None:
        """See `LineParser`."""
        values = _object(line)
        return TraceRequest(
            arrival_s=_number(values, "timestamp") / 1e3,
            num_prompt_tokens=_integer(values, "input_length"),
            num_output_tokens=_integer(values, "output_length"),
            prefix_ids=_integers(values, "hash_ids"),
        )


class RecordedParser:
    """Requests as `TraceWriter` writes them: JSON lines."""

    def parse(self, line: str) -> TraceRequest | None:
        """See `LineParser`."""
        values = _object(line)
        unknown = sorted(set(values) - _RECORDED_FIELDS)
        if unknown:
            raise ValueError(f"unknown field {', '.join(unknown)}")
        tenant = values.get("tenant", "")
        if not isinstance(tenant, str):
            raise ValueError(f"tenant must be text, not {tenant!r}")
        return TraceRequest(
            arrival_s=_number(values, "arrival_s"),
            num_prompt_tokens=_integer(values, "prompt_tokens"),
            num_output_tokens=_integer(values, "output_tokens"),
            tenant=tenant,
            priority=_integer(values, "priority", 0),
            ttft_deadline_s=_number(values, "ttft_deadline_s", math.inf),
            deadline_s=_number(values, "deadline_s", math.inf),
            prefix_ids=_integers(values, "prefix_ids") if "prefix_ids" in values else (),
            prefix_block_tokens=_integer(
                values, "prefix_block_tokens", DEFAULT_PREFIX_BLOCK_TOKENS
            ),
        )


def recorded_line(request: TraceRequest) -> str:
    """A request as `RecordedParser` reads it, without what is at its default. No newline."""
    values: dict[str, Any] = {
        "arrival_s": request.arrival_s,
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
    }
    if request.tenant:
        values["tenant"] = request.tenant
    if request.priority:
        values["priority"] = request.priority
    for name in ("ttft_deadline_s", "deadline_s"):
        if getattr(request, name) != math.inf:
            values[name] = getattr(request, name)
    if request.prefix_ids:
        values["prefix_ids"] = request.prefix_ids
        if request.prefix_block_tokens != DEFAULT_PREFIX_BLOCK_TOKENS:
            values["prefix_block_tokens"] = request.prefix_block_tokens
    return json.dumps(values)


def parser_of(trace_format: TraceFormat) -> LineParser:
    """A fresh parser."""
    match trace_format:
        case TraceFormat.AZURE:
            return AzureParser()
        case TraceFormat.MOONCAKE:
            return MooncakeParser()
        case TraceFormat.RECORDED:
            return RecordedParser()


def format_of(first_line: str) -> TraceFormat:
    """Which format a file is in, told by its first line. Raises ValueError when it is none."""
    if all(name in first_line for name in _AZURE_COLUMNS):
        return TraceFormat.AZURE
    if first_line.lstrip().startswith("{"):
        values = _object(first_line)
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
        return int(cell)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {cell!r}") from None


def _object(line: str) -> dict[str, object]:
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
    value = values.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of whole numbers")
    items = cast("list[object]", value)
    # bool is an int to Python, never to a reader of traces.
    if not all(type(item) is int for item in items):
        raise ValueError(f"{name} must be a list of whole numbers")
    return cast("tuple[int, ...]", tuple(items))
