"""A lone surrogate cannot be encoded in UTF-8: the client rejects a request that contains one and
names the field; other requests are not affected.
"""

from typing import Any

import pytest

import penstock.v1 as pb
from penstock.client import Adapter, ChatMessage, MultiplexConfig, RegexConstraint, TraceContext
from penstock.client.encoding import encode_request
from penstock.client.multiplex import MultiplexedRequests
from penstock.client.options import build_request

HALF = "private \ud83d"
CONVERSATION = [ChatMessage(role="user", content="Hi"), ChatMessage(role="user", content=HALF)]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (HALF, {}, "text_prompt.text"),
        (CONVERSATION, {}, "chat_prompt.messages[1].parts[0].text"),
        ("Hi", {"stop": ["a", HALF]}, "stop[1]"),
        ("Hi", {"model": HALF}, "model"),
        ("Hi", {"request_id": HALF}, "request_id"),
        ("Hi", {"adapter": Adapter(name=HALF)}, "adapter.name"),
        ("Hi", {"constraint": RegexConstraint(pattern=HALF)}, "constraint.regex.pattern"),
    ],
)
def test_a_request_with_a_lone_surrogate_is_rejected_by_its_field(
    prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match="is not valid UTF-8") as caught:
        encode_request(build_request(prompt, options))  # type: ignore[arg-type]  # as callers do
    reported = str(caught.value)
    assert reported.startswith(f"{field}: ")
    assert "private" not in reported


@pytest.mark.parametrize("value", [HALF, "x\n", "é"])
def test_a_trace_that_cannot_be_a_header_is_rejected(value: str) -> None:
    with pytest.raises(ValueError, match=r"^traceparent: must be printable ASCII"):
        TraceContext(traceparent=value)
    with pytest.raises(ValueError, match=r"^tracestate: must be printable ASCII"):
        TraceContext(traceparent="", tracestate=value)


def test_a_submit_that_cannot_be_encoded_leaves_the_call_usable() -> None:
    calls = MultiplexedRequests(MultiplexConfig(), opened_at_s=0.0)
    request = pb.GenerateRequest(text_prompt=pb.TextPrompt(text="Hi"))
    opened, _ = calls.submit(request, timeout_s=None, traceparent=None, wake=lambda: None)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        calls.submit(request, timeout_s=None, traceparent=HALF, wake=lambda: None)
    assert calls.num_open == 1
    assert calls.can_submit(0.0)
    assert opened.take() is None
