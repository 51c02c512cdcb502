"""The live requests that a front reports."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from penstock.server.front.config import FrontConfig
from penstock.server.front.front import Front
from penstock.server.front.generation import Generation, Sampling, TextInput, Urgency
from penstock.server.front.submission import CallTimes
from penstock.server.text.model_text import ModelText
from support.fronts import ScriptedPort, admitted


async def test_a_view_follows_its_request(text: ModelText) -> None:
    port = ScriptedPort()
    times = iter(range(100, 200))
    front = Front(
        text,
        FrontConfig(front_id=4, acceptance_delay_s=60.0),
        port=port,
        clock=lambda: float(next(times)),
    )
    port.listener = cast(Any, front)
    port.come_up()
    generation = Generation(
        prompt=TextInput(text="canary"),
        prompt_path="text_prompt.text",
        request_id="r-1",
        sampling=Sampling(num_outputs=2),
        urgency=Urgency(priority=7),
        tenant="acme",
        trace_id=b"\xab" * 16,
    )
    call = CallTimes(arrival_s=100.0)
    request = front.reserve(generation, call)
    (view,) = front.live_views()
    assert (view.phase, view.keys, view.num_prompt_tokens) == ("prepare", (), 0)
    assert (view.front_id, view.request_id, view.tenant, view.priority) == (4, "r-1", "acme", 7)
    assert view.trace_id == "ab" * 16
    assert view.history == (("prepare", 100.0),)

    await front.start(request, call)
    specs = await asyncio.wait_for(port.next_submission(), 60)
    (view,) = front.live_views()
    assert view.phase == "queue"
    assert view.keys == tuple(spec.key for spec in specs)
    assert view.num_prompt_tokens == specs[0].num_prompt_tokens > 0
    assert [spec.trace_id for spec in specs] == [b"\xab" * 16] * 2

    port.say(changes=[admitted(specs[0].key, num_cached_tokens=1)])
    token = text.tokenizer.encode("a", add_special_tokens=False).tolist()[0]
    port.say(tokens=[(specs[0].key, token), (specs[0].key, token)])
    (view,) = front.live_views()
    assert view.phase == "decode"
    assert [phase for phase, _ in view.history] == ["prepare", "queue", "prefill", "decode"]
    assert (view.num_output_tokens, view.num_cached_tokens, view.num_preemptions) == (2, 1, 0)
    assert view.num_backlog_tokens == front.num_backlog_tokens == 2
    assert "canary" not in repr(view)

    front.release(request)
    assert list(front.live_views()) == []
    assert front.num_backlog_tokens == 0
