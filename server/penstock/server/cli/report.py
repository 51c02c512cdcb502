"""Formats the output of commands: text for humans, a summary line, and JSON for programs."""

import dataclasses
import enum
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client import Event, Finished

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return `text` with U+FFFD in place of control characters except newline and tab.

    Control characters in the output of a model could control the terminal.
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def write_text(text: str) -> None:
    """Write `text` to stdout and flush it. On a terminal, control characters are replaced (see
    `printable`)."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def event_json(event: "Event") -> str:
    """Return one event as one line of JSON. Its kind is under "event"; enums are encoded by
    name."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    return json.dumps({"event": kind, **plain(event)})


def value_json(value: Any, **instead: Any) -> str:
    """Return a dataclass instance as one line of JSON. `instead` maps names of fields to values
    that replace the values of these fields."""
    return json.dumps({**plain(value), **instead})


def summary_line(finished: "Finished") -> str:
    """Return queue time, TTFT, speed, finish reasons and usage as one line."""
    timings, usage = finished.timings, finished.usage
    queue = f"queue {duration(timings.queue_s)}"
    if timings.ttft_s is not None and timings.queue_s > timings.ttft_s:
        # It was preempted, or continued in the engine process that replaced a dead one.
        queue += ", also after the first token"
    parts = (
        queue,
        f"TTFT {duration(timings.ttft_s)}",
        f"{rate(finished.tokens_per_s)} tokens/s",
        f"finish {finish_summary(finished)}",
        f"{usage.num_completion_tokens} tokens"
        f" (prompt {usage.num_prompt_tokens}, cached {usage.num_cached_prompt_tokens})",
    )
    return " | ".join(parts)


def table_lines(
    rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust
) -> list[str]:
    """Format rows of equal length as lines with aligned columns. `align` fills a cell with spaces
    up to a width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(align(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def finish_summary(finished: "Finished") -> str:
    """Format the distinct finish reasons of the outputs with their counts: "length x15,
    stop_string"."""
    counts = Counter(end.finish_reason.name.lower() for end in finished.outputs)
    return ", ".join(name if num == 1 else f"{name} x{num}" for name, num in counts.items())


def duration(value_s: float | None) -> str:
    """Format a duration with its unit; "-" for None."""
    if value_s is None:
        return "-"
    return f"{value_s * 1e3:.1f} ms" if value_s < 1 else f"{value_s:.2f} s"


def rate(value: float | None) -> str:
    """Format a rate per second; "-" for None."""
    return "-" if value is None else f"{value:.1f}"


def plain(value: Any) -> dict[str, Any]:
    """Convert a dataclass instance to plain JSON types. Enums are encoded by name."""
    return dataclasses.asdict(value, dict_factory=_by_name)


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.name if isinstance(value, enum.Enum) else value for key, value in pairs}
