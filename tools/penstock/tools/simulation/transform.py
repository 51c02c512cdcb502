"""Changes a trace before its replay: selects a time window, truncates lengths, replaces tenants,
sets deadlines, scales the load.

Window and `max_requests` come first; the other changes are independent of each other. Requests are
changed one by one, so a trace can be read as a stream.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.scheduler.setting import SettingError, check, setting
from penstock.server.observe.recording.trace import MAX_ARRIVAL_S, TraceRequest
from penstock.tools.simulation.synthetic import TenantChoice, TenantShare
from penstock.tools.simulation.trace_formats import check_unique


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformConfig:
    """Changes to a trace. Raises SettingError, naming the field, if one is invalid.

    `load`: factor by which the arrival rate is multiplied. `start_s`, `end_s`: the window, as times
    in the trace; `start_s` becomes time 0. `tenants`: if given, each request is assigned to one of
    them, drawn at random by their shares. Deadlines are seconds after arrival.
    """

    load: float = setting(1.0, "trace", "factor of the arrival rate", at_least=1e-6, at_most=1e6)
    start_s: float = setting(0.0, "trace", "omit requests that arrive earlier, seconds", at_least=0)
    end_s: float = setting(
        math.inf, "trace", "omit requests that arrive later, seconds", above=0, may_be_infinite=True
    )
    max_requests: int | None = setting(
        None, "trace", "use only the first N requests of the window", at_least=1, shown="all"
    )
    max_prompt_tokens: int | None = setting(
        None, "trace", "truncate prompts to N tokens", at_least=1, shown="no limit"
    )
    max_output_tokens: int | None = setting(
        None, "trace", "truncate outputs to N tokens", at_least=1, shown="no limit"
    )
    tenants: tuple[TenantShare, ...] = setting(
        (),
        "trace",
        "assign requests to these tenants, by their shares",
        kind=str,
        metavar="NAME=SHARE,...",
        shown="as in the trace",
    )
    ttft_deadline_s: float = setting(
        math.inf, "trace", "TTFT deadline, seconds after arrival", above=0, may_be_infinite=True
    )
    deadline_s: float = setting(
        math.inf,
        "trace",
        "deadline for the complete output, seconds after arrival",
        above=0,
        may_be_infinite=True,
    )
    deadline_share: float = setting(
        1.0, "trace", "share of the requests that have the deadlines", at_least=0, at_most=1
    )
    seed: int = setting(0, "trace", "seed of the choice of tenants and deadlines", at_least=0)

    def __post_init__(self) -> None:
        check(self)
        check_unique("tenants", (tenant.name for tenant in self.tenants))
        if not self.start_s < self.end_s:
            raise SettingError("{} must be before {}", "start_s", "end_s")


def transformed(trace: Iterable[TraceRequest], config: TransformConfig) -> Iterator[TraceRequest]:
    """Yield the requests of the trace with the changes applied. The trace must be in order of
    arrival. If a request already has a deadline, the earlier deadline is kept.

    Raises SettingError if `load` is so low that a request would arrive after MAX_ARRIVAL_S.
    """
    # Separate random streams: drawing tenants does not change which requests have a deadline.
    choose = TenantChoice(config.tenants, np.random.default_rng([config.seed, 1]))
    random = np.random.default_rng([config.seed, 2])
    for index, request in enumerate(_windowed(trace, config)):
        if index == config.max_requests:
            return
        is_urgent = random.random() < config.deadline_share
        capped = _capped(request, config)
        arrival_s = (request.arrival_s - config.start_s) / config.load
        if arrival_s > MAX_ARRIVAL_S:
            raise SettingError(
                f"{{}} must be greater: with {config.load:g} a request arrives after"
                f" {arrival_s:g} s, and {MAX_ARRIVAL_S:g} is the most",
                "load",
            )
        yield msgspec.structs.replace(
            capped,
            arrival_s=arrival_s,
            tenant=choose() if config.tenants else request.tenant,
            ttft_deadline_s=min(
                request.ttft_deadline_s, config.ttft_deadline_s if is_urgent else math.inf
            ),
            deadline_s=min(request.deadline_s, config.deadline_s if is_urgent else math.inf),
        )


def _windowed(trace: Iterable[TraceRequest], config: TransformConfig) -> Iterator[TraceRequest]:
    for request in trace:
        if request.arrival_s >= config.end_s:
            return
        if request.arrival_s >= config.start_s:
            yield request


def _capped(request: TraceRequest, config: TransformConfig) -> TraceRequest:
    num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
    num_prompt = min(num_prompt, config.max_prompt_tokens or num_prompt)
    num_output = min(num_output, config.max_output_tokens or num_output)
    if (num_prompt, num_output) == (request.num_prompt_tokens, request.num_output_tokens):
        return request
    num_ids = -(-num_prompt // request.prefix_block_tokens)
    return msgspec.structs.replace(
        request,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        prefix_ids=request.prefix_ids[:num_ids],
    )
