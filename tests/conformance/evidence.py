"""The evidence that each scenario leaves at the service: the root spans of its requests.

The output of a program is not sufficient: it must have sent the requests. The
module defines the expected spans; the service exports them, so no client can forge them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from support.otlp_receiver import attributes_of

LONG_TOKENS = 10_000
RESUMED_TOKENS = 200
DRIVER_PREFIX = "conformance-driver-"
"""The prefix of the driver's own request ids, which are no evidence."""
_SERVICE = "penstock.v1.GenerationService/"
_STREAM, _ONCE, _MULTIPLEX = "Generate", "GenerateOnce", "Multiplex"


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSpan:
    """A request as described by its root span. Missing values are "" or 0."""

    method: str
    code: str
    reason: str = ""
    finish: str = ""
    operation: str = ""
    request_id: str = ""
    temperature: float | None = None
    num_asked_tokens: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_messages: int = 0
    num_replays: int = 0
    is_of_callers_trace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRequest:
    """A kind of request of which a scenario must send at least `num`. Fields that are None match
    any value; `num_tokens`, the other `num_*_tokens` and `num_replays` are minimums.

    `methods`: the request used one of these. `is_cut`: its call received fewer messages than half
    of the requested tokens.
    """

    methods: tuple[str, ...] = (_STREAM, _ONCE)
    code: str | None = None
    reason: str | None = None
    finish: str | None = None
    operation: str | None = None
    temperature: float | None = None
    num_asked_tokens: int | None = None
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_replays: int | None = None
    is_of_callers_trace: bool | None = None
    is_cut: bool | None = None
    num: int = 1

    def fits(self, root: RootSpan) -> bool:
        is_cut = root.num_messages < root.num_asked_tokens / 2
        return (
            root.method in self.methods
            and self.is_cut in (None, is_cut)
            and all(
                wanted is None or _is_met(name, getattr(root, name), wanted)
                for name, wanted in self._wanted()
            )
        )

    def __str__(self) -> str:
        wanted = [f"{name}={value}" for name, value in self._wanted() if value is not None]
        wanted += ["cut short"] if self.is_cut else []
        return f"{self.num} × {' or '.join(self.methods)} with {', '.join(wanted)}"

    def _wanted(self) -> list[tuple[str, Any]]:
        own = ("methods", "is_cut", "num")
        return [
            (each.name, getattr(self, each.name)) for each in fields(self) if each.name not in own
        ]


def _is_met(name: str, value: Any, wanted: Any) -> bool:
    return bool(value >= wanted if name.startswith("num_") else value == wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSpans:
    """The spans that a scenario must leave. `one_id`: whether two of its requests must have the
    same id.

    `num_made_tokens`: minimum number of tokens generated in the scenario, by the engine's counters.
    """

    trails: tuple[ExpectedRequest, ...]
    one_id: bool = False
    num_made_tokens: int = 0

    def lacks(self, roots: Sequence[RootSpan]) -> str:
        """Return a description of the missing evidence; "" if none is missing."""
        for trail in self.trails:
            if sum(map(trail.fits, roots)) < trail.num:
                return f"no {trail}"
        ids = [root.request_id for root in roots if root.request_id]
        if self.one_id and len(set(ids)) == len(ids):
            return "no two requests with one id"
        return ""


def roots_of(spans: Sequence[Any]) -> list[RootSpan]:
    """Return the generation requests that the service's spans describe, except the requests that
    the test driver itself sent.
    """
    report = [(span, attributes_of(span.attributes)) for span in spans]
    return [
        _root(span, attributes)
        for span, attributes in report
        if str(attributes.get("rpc.method", "")).startswith(_SERVICE)
        and not str(attributes.get("gen_ai.response.id", "")).startswith(DRIVER_PREFIX)
    ]


def _root(span: Any, attributes: Mapping[str, Any]) -> RootSpan:
    finishes = attributes.get("gen_ai.response.finish_reasons", ())
    return RootSpan(
        method=str(attributes["rpc.method"]).removeprefix(_SERVICE),
        code=attributes.get("rpc.response.status_code", ""),
        reason=attributes.get("penstock.error.reason", ""),
        finish=finishes[0] if finishes else "",
        operation=attributes.get("gen_ai.operation.name", ""),
        request_id=attributes.get("gen_ai.response.id", ""),
        temperature=attributes.get("gen_ai.request.temperature"),
        num_asked_tokens=attributes.get("gen_ai.request.max_tokens", 0),
        num_tokens=attributes.get("gen_ai.usage.output_tokens", 0),
        num_prompt_tokens=attributes.get("gen_ai.usage.input_tokens", 0),
        num_messages=attributes.get("penstock.messages", 0),
        num_replays=attributes.get("penstock.replays", 0),
        is_of_callers_trace=bool(span.parent_span_id),
    )


def _streamed(num_tokens: int, **more: Any) -> ExpectedRequest:
    return ExpectedRequest(
        methods=(_STREAM,), code="OK", finish="length", num_tokens=num_tokens, **more
    )


def _answered(num_tokens: int, **more: Any) -> ExpectedRequest:
    return ExpectedRequest(
        methods=(_ONCE,), code="OK", finish="length", num_tokens=num_tokens, **more
    )


def _rejected(code: str, reason: str, **more: Any) -> ExpectedRequest:
    return ExpectedRequest(code=code, reason=reason, **more)


def _left(
    *trails: ExpectedRequest, one_id: bool = False, num_made_tokens: int = 0
) -> ExpectedSpans:
    return ExpectedSpans(trails=trails, one_id=one_id, num_made_tokens=num_made_tokens)


_QUEUE_FULL = _rejected("RESOURCE_EXHAUSTED", "QUEUE_FULL")

EVIDENCE: Mapping[str, ExpectedSpans] = {
    "stream_in_order": _left(_streamed(12)),
    "once_equals_stream": _left(_streamed(1), _answered(1)),
    "token_prompt": _left(ExpectedRequest(code="OK", finish="length", num_tokens=12, num=2)),
    "chat": _left(_streamed(1, operation="chat")),
    "utf8_across_chunks": _left(_streamed(200), _answered(200)),
    "large_prompt": _left(ExpectedRequest(code="OK", num_tokens=1, num_prompt_tokens=100_000)),
    "invalid_field": _left(_rejected("INVALID_ARGUMENT", "INVALID_ARGUMENT", temperature=-1.0)),
    "unknown_model": _left(_rejected("NOT_FOUND", "MODEL_NOT_FOUND")),
    "unimplemented_feature": _left(_rejected("UNIMPLEMENTED", "FEATURE_UNSUPPORTED")),
    "duplicate_request_id": _left(
        _rejected("ALREADY_EXISTS", "REQUEST_ID_IN_USE"), _streamed(1), one_id=True
    ),
    "cancel_after_first_token": _left(
        ExpectedRequest(
            methods=(_STREAM,), code="CANCELLED", num_asked_tokens=LONG_TOKENS, num_tokens=1
        ),
        ExpectedRequest(code="OK", finish="length", num_tokens=1),
        one_id=True,
    ),
    "cancel_by_id": _left(
        ExpectedRequest(
            methods=(_STREAM,), code="OK", finish="cancelled", num_asked_tokens=LONG_TOKENS
        )
    ),
    "deadline": _left(
        _rejected("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", num_asked_tokens=LONG_TOKENS)
    ),
    "queue_full": _left(
        _QUEUE_FULL, ExpectedRequest(methods=(_STREAM,), num_asked_tokens=LONG_TOKENS, num=8)
    ),
    "metadata": _left(ExpectedRequest(code="OK", num_tokens=1, is_of_callers_trace=True)),
    "multiplex": _left(
        ExpectedRequest(methods=(_MULTIPLEX,), code="OK", finish="length", num_tokens=20, num=8),
        ExpectedRequest(
            methods=(_MULTIPLEX,), code="OK", finish="cancelled", num_asked_tokens=LONG_TOKENS
        ),
        ExpectedRequest(methods=(_MULTIPLEX,), reason="INVALID_ARGUMENT", temperature=-1.0),
        _answered(1, num=6),
    ),
    # Resume continues a request and leaves no span. The call that was cut leaves one, and the
    # engine's token counter shows that the request continued.
    "resume": _left(
        ExpectedRequest(methods=(_STREAM,), num_asked_tokens=RESUMED_TOKENS, is_cut=True),
        _answered(RESUMED_TOKENS),
        num_made_tokens=2 * RESUMED_TOKENS,
    ),
    "retry_after_rejection": _left(
        _QUEUE_FULL,
        ExpectedRequest(methods=(_STREAM,), num_asked_tokens=300, num=8),
        ExpectedRequest(code="OK", finish="length", num_tokens=1),
    ),
    "engine_killed": _left(_streamed(200, num_replays=1), _answered(200)),
    # A call on a new connection may be rejected before anything is traced.
    "drain": _left(_streamed(300)),
}
