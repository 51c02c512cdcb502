"""Output formats: text for people, a summary line, JSON for programs."""

import dataclasses
import enum
import json
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client import Event, Finished

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replace control characters except newline and tab: a model must not move the cursor."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def write_text(text: str) -> None:
    """Write and flush output: `printable` on a terminal, unchanged into a pipe or a file."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def event_json(event: "Event") -> str:
    """Return one event as one line of JSON; its kind is under "event", enums by name."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    return json.dumps({"event": kind, **plain(event)})


def value_json(value: Any, **instead: Any) -> str:
    """Return a value as one line of JSON; `instead`: fields that are shown in another form."""
    return json.dumps({**plain(value), **instead})


def summary_line(finished: "Finished") -> str:
    """Format queue time, TTFT, speed, finish reasons and usage."""
    timings, usage = finished.timings, finished.usage
    parts = (
        f"queue {milliseconds(timings.queue_s)}",
        f"TTFT {milliseconds(timings.ttft_s)}",
        f"{rate(finished.tokens_per_s)} tokens/s",
        f"finish {finish_reasons(finished)}",
        f"{usage.num_completion_tokens} tokens"
        f" (prompt {usage.num_prompt_tokens}, cached {usage.num_cached_prompt_tokens})",
    )
    return " | ".join(parts)


def finish_reasons(finished: "Finished") -> str:
    """Format the finish reasons of the outputs, each once: "length x15, stop_string"."""
    counts = Counter(end.finish_reason.name.lower() for end in finished.outputs)
    return ", ".join(name if num == 1 else f"{name} x{num}" for name, num in counts.items())


def milliseconds(value_s: float | None) -> str:
    """Format a duration with its unit; "-" for none."""
    return "-" if value_s is None else f"{value_s * 1e3:.1f} ms"


def rate(value: float | None) -> str:
    """Format a figure per second; "-" for none."""
    return "-" if value is None else f"{value:.1f}"


def plain(value: Any) -> dict[str, Any]:
    """Convert a value to plain JSON types, enums by name."""
    return dataclasses.asdict(value, dict_factory=_by_name)


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.name if isinstance(value, enum.Enum) else value for key, value in pairs}
