"""Defines the scenarios of docs/why-is-it-slow.md: the load and the settings of each, and the
queries and pictures that show its cause.

`COST` determines the step times, so the figures are nearly the same in every run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from load import TENANT_KEY, LoadRequest
from picture_svg import BLUE, GREEN
from picture_timeline import View

COST = {"step_s": 0.006, "prefill_token_s": 1e-4, "decode_slot_s": 5e-4, "context_token_s": 0.0}
_MACHINE = (
    *("--simulated-config", json.dumps({"cost": COST}), "--step-cost", json.dumps(COST)),
    *("--model-name", "demo"),
)
_QUEUED = "sum by (reason) (rate(penstock_queue_wait_seconds_total[5m]))"
_TTFT = (
    "histogram_quantile(0.99, sum by (le) (rate(penstock_time_to_first_token_seconds_bucket[5m])))"
)
_ITL = (
    "histogram_quantile(0.99, sum by (le) (rate(penstock_inter_token_latency_seconds_bucket[5m])))"
)
_STEP = "histogram_quantile(0.999, sum by (le) (rate(penstock_step_seconds_bucket[5m])))"
_STALLED = (
    "histogram_quantile(0.99, sum by (le) (rate(penstock_stream_stalled_seconds_bucket[5m])))"
)
_RUNNING = "max_over_time(penstock_num_requests_running[5m])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario of docs/why-is-it-slow.md: one cause of slowness.

    Attributes:
        options: Options of the service.
        changed_options: Options of the second run, which override or extend `options`.
        second_name: Name of the second run; empty if there is none.
        second_requests: Requests of the second run; if empty, the same as in the first.
        groups: Prefixes of request names; the requests with the same prefix are reported together.
        queries: Unit of the result of each PromQL query ("s" or empty), by query; `[5m]` is
            replaced by the duration of the run.
        top_s, kill_s: Seconds after the start of the load at which `penstock top` is captured, and
            at which the engine is killed (None: never).
        has_timeline_after, has_top: Whether the page has these pictures in addition to the timeline
            of the first run.
        log_words: Words that select the log lines to include.
    """

    name: str
    options: tuple[str, ...]
    requests: tuple[LoadRequest, ...]
    groups: tuple[str, ...]
    queries: Mapping[str, str]
    view: View
    changed_options: tuple[str, ...] = ()
    second_name: str = ""
    top_s: float = 2.0
    kill_s: float | None = None
    second_requests: tuple[LoadRequest, ...] = ()
    has_timeline_after: bool = False
    has_top: bool = True
    log_words: tuple[str, ...] = ()

    @property
    def first_options(self) -> tuple[str, ...]:
        """Options of the first run."""
        return (*_MACHINE, *self.options)

    @property
    def second_options(self) -> tuple[str, ...]:
        """Options of the second run; a later option overrides an earlier one."""
        return (*_MACHINE, *self.options, *self.changed_options)


def _request(name: str, at_s: float, num_prompt: int, num_tokens: int, **more: Any) -> LoadRequest:
    """Return a request whose prompt shares no prefix with others."""
    ids = tuple(random.Random(name).choices(range(300, 340), k=num_prompt))
    return LoadRequest(name=name, at_s=at_s, ids=ids, num_tokens=num_tokens, **more)


def _short_of_blocks() -> Case:
    requests = [_request(f"essay-{i + 1}", 0.12 * i, 96, 200) for i in range(12)]
    return Case(
        name="blocks",
        options=("--max-num-seqs", "16", "--block-size", "16", "--num-blocks", "110"),
        changed_options=("--num-blocks", "240"),
        second_name="--num-blocks 240",
        requests=tuple(requests),
        groups=("essay-",),
        queries={
            _TTFT: "s",
            _QUEUED: "",
            "increase(penstock_preemptions_total[5m])": "",
            "max_over_time(penstock_kv_cache_usage_ratio[5m])": "",
            _RUNNING: "",
        },
        view=View(
            title="KV blocks are short: who waits, who is preempted", highlighted=("essay-9",)
        ),
        top_s=2.0,
    )


def _tenant_flood() -> Case:
    requests = [_request(f"batch-{i + 1}", 0.3, 64, 100, tenant="batch") for i in range(36)]
    requests += [
        _request(
            f"chat-{i + 1}",
            0.1 + 0.6 * i,
            48,
            24,
            tenant="chat",
        )
        for i in range(7)
    ]
    return Case(
        name="flood",
        options=(
            *("--max-num-seqs", "6", "--block-size", "16", "--num-blocks", "400"),
            *("--tenant-metadata-key", TENANT_KEY, "--order", "fcfs"),
            *("--metrics-tenants", "batch,chat"),
        ),
        changed_options=("--order", "fair"),
        second_name="--order fair",
        requests=tuple(requests),
        groups=("chat-", "batch-"),
        queries={
            _QUEUED: "",
            "sum by (tenant) (rate(penstock_tenant_queue_seconds_total[5m]))": "",
            "sum by (tenant) (rate(penstock_tenant_generation_tokens_total[5m]))": "",
        },
        view=View(
            title="A flood: one tenant holds every slot and the whole queue",
            highlighted=("chat-4",),
            tenants={"batch": BLUE, "chat": GREEN},
            max_lanes=14,
            areas=("waiting",),
        ),
        top_s=3.4,
    )


def _long_prompt() -> Case:
    requests = [_request(f"chat-{i + 1}", 0.05 * i, 64, 220) for i in range(6)]
    requests += [_request(f"report-{i + 1}", 0.7 + 1.3 * i, 6000, 40) for i in range(2)]
    requests.append(_request("chat-7", 0.8, 64, 100))
    return Case(
        name="prompt",
        options=(
            *("--max-num-seqs", "16", "--block-size", "16", "--num-blocks", "1200"),
            *("--max-num-batched-tokens", "8192", "--max-seq-len", "8192"),
        ),
        changed_options=("--target-itl-ms", "30"),
        second_name="--target-itl-ms 30",
        requests=tuple(requests),
        groups=("chat-", "report-"),
        queries={
            _ITL: "s",
            _ITL.replace("0.99", "0.999"): "s",
            _STEP: "s",
            "histogram_quantile(0.999, sum by (le) (rate(penstock_step_tokens_bucket[5m])))": "",
        },
        view=View(
            title="One long prompt: a step that everybody waits for",
            highlighted=("report-1", "chat-7"),
            areas=(),
        ),
        has_timeline_after=True,
        top_s=1.5,
    )


def _slow_reader() -> Case:
    def requests(read_s: float) -> tuple[LoadRequest, ...]:
        quick = [_request(f"chat-{i + 1}", 0.1 * i, 48, 300) for i in range(3)]
        slow = _request(
            "slow-1",
            0.2,
            48,
            300,
            read_s=read_s,
        )
        return (*quick, slow)

    return Case(
        name="reader",
        options=("--max-num-seqs", "8", "--block-size", "16", "--num-blocks", "400"),
        second_name="a reader that keeps up",
        requests=requests(0.02),
        second_requests=requests(0.0),
        groups=("slow-", "chat-"),
        queries={
            "increase(penstock_stream_stalls_total[5m])": "",
            _STALLED: "s",
            "max_over_time(penstock_stream_backlog_tokens[5m])": "",
            _ITL: "s",
        },
        view=View(title="A slow reader: the engine knows nothing of it", areas=("running",)),
        top_s=3.0,
    )


def _killed_engine() -> Case:
    requests = [_request(f"essay-{i + 1}", 0.15 * i, 64, 280) for i in range(6)]
    requests.append(_request("late-1", 4.5, 64, 40))
    return Case(
        name="killed",
        options=(
            *("--max-num-seqs", "4", "--block-size", "16", "--num-blocks", "400"),
            *("--max-replays", "0"),  # with replay the streams would continue on the next engine
        ),
        requests=tuple(requests),
        groups=("essay-", "late-"),
        queries={
            "increase(penstock_engine_restarts_total[5m])": "",
            "sum by (reason) (increase(penstock_request_errors_total[5m]))": "",
        },
        view=View(title="An engine that was killed: its last steps", areas=("waiting",)),
        kill_s=1.8,
        top_s=2.1,
        has_top=False,
        log_words=("flight record", "engine died", "engine is ready"),
    )


def cases() -> tuple[Case, ...]:
    """Return all cases, in the order of the page."""
    return (_short_of_blocks(), _tenant_flood(), _long_prompt(), _slow_reader(), _killed_engine())
