"""Defines the routers, which choose the replica of each request.

A router uses the request, the reported loads and its earlier decisions; it has no access to
replicas. Among equal replicas, the one that was chosen longest ago is taken, so that runs are
repeatable and an idle cluster is used evenly.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.scheduler.setting import check, setting
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.load_signal import LoadSignal


class PrefixIndex:
    """The prefix ids of the prompts sent to one replica, with their tenants; only the `max_entries`
    most recently used are kept.

    A prefix id identifies one block of a prompt and everything before it.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def num_matched_tokens(self, request: TraceRequest) -> int:
        """Return the length, in tokens, of the longest prefix of the request's prompt that is in
        the index for its tenant.
        """
        num_blocks = 0
        for prefix_id in request.prefix_ids:
            if (request.tenant, prefix_id) not in self._entries:
                break
            num_blocks += 1
        return min(num_blocks * request.prefix_block_tokens, request.num_prompt_tokens)

    def add(self, request: TraceRequest) -> None:
        """Record the prefix ids of a prompt that was sent to this replica."""
        # In reverse order, so that earlier blocks are dropped later: a block is useless without the
        # ones before it.
        for prefix_id in reversed(request.prefix_ids):
            key = (request.tenant, prefix_id)
            self._entries[key] = None
            self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)


DEFAULT_SLACK = {LoadSignal.REQUESTS: 8, LoadSignal.TOKENS: 16_384}


class RouterKind(enum.StrEnum):
    """The available routers; see the classes RoundRobin, LeastLoaded and PrefixAware."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    PREFIX_AWARE = "prefix_aware"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How requests are distributed. Raises SettingError, naming the field, if one is invalid.

    `load_signal`, `load_signal_delay_s`: how a replica's load is measured (see `LoadAccount`); not
    used by ROUND_ROBIN. The fields after these two apply to PREFIX_AWARE only.
    """

    router: RouterKind = setting(RouterKind.ROUND_ROBIN, "routing", "rule that chooses a replica")
    load_signal: LoadSignal = setting(
        LoadSignal.REQUESTS,
        "routing",
        "not round_robin: what of its unfinished requests is a replica's load: their number, or"
        " the tokens of their prompts",
    )
    load_signal_delay_s: float = setting(
        0.0,
        "routing",
        "except round_robin: delay of the reported loads, seconds",
        at_least=0,
    )
    overload_factor: float = setting(
        1.5,
        "routing",
        "prefix_aware: overloaded is a replica above X times the least load...",
        at_least=1,
    )
    overload_slack: int | None = setting(
        None,
        "routing",
        "... and more than N above it",
        at_least=0,
        shown="8 requests, 16384 tokens",
    )
    min_prefix_share: float = setting(
        0.3,
        "routing",
        "prefix_aware: minimum share of a prompt that a known prefix must cover",
        at_least=0,
        at_most=1,
    )
    max_index_tokens: int | None = setting(
        None,
        "routing",
        "prefix_aware: prompt tokens in the router's index per replica",
        at_least=1,
        shown="the capacity of its KV cache",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def slack(self) -> int:
        """The setting `overload_slack`, or the default for the load signal."""
        if self.overload_slack is None:
            return DEFAULT_SLACK[self.load_signal]
        return self.overload_slack


class Router(Protocol):
    """Interface of the routers; a choice may depend on earlier choices."""

    def route(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """Return the index of the replica for an arriving request; `loads`: the reported load of
        each replica.
        """
        ...


class RoundRobin:
    """Chooses the replicas one after the other, independent of requests and loads."""

    def __init__(self, num_replicas: int) -> None:
        self._least_recent = _LeastRecentlyChosen(num_replicas)

    def route(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """Return the index of the next replica; only the number of entries of `loads` is used."""
        del request
        return self._least_recent.choose(range(len(loads)))


class LeastLoaded:
    """Chooses the replica with the lowest load."""

    def __init__(self, num_replicas: int) -> None:
        self._least_recent = _LeastRecentlyChosen(num_replicas)

    def route(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """Return the index of the lowest load; among equal loads, the index chosen longest ago."""
        del request
        least = min(loads)
        return self._least_recent.choose(i for i, load in enumerate(loads) if load == least)


class PrefixAware:
    """Chooses, among the replicas that are not overloaded, the one that already received the
    longest prefix of the prompt; among equals, the one with the lowest load.

    A replica is overloaded if its load is above `factor` times the lowest load and more than
    `slack` above it. SGLang's cache-aware router has the same two thresholds. It ignores prefixes
    for all requests if the maximum and the minimum load differ by more than both. Here the
    thresholds apply to each replica separately, as in consistent hashing with bounded loads
    (Mirrokni, Thorup and Zadimoghaddam, SODA 2018), so that one overloaded replica does not disable
    prefix routing for the others.

    A prefix is ignored if its share of the prompt's tokens is below `min_share`, as in SGLang's
    router. Otherwise a prefix common to all prompts would send all requests to one replica.
    `max_index_tokens`: maximum number of prompt tokens in the index of each replica's prefixes.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        factor: float,
        slack: int,
        max_index_tokens: int,
        min_share: float = 0.0,
    ) -> None:
        self._least_recent = _LeastRecentlyChosen(num_replicas)
        self._factor = factor
        self._slack = slack
        self._max_index_tokens = max_index_tokens
        self._min_share = min_share
        self._indices: list[PrefixIndex] | None = None
        self._num_replicas = num_replicas

    def route(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """Return the index of the replica for an arriving request; `loads`: the reported load of
        each replica.
        """
        indices = self._indices_for(request)
        least = min(loads)
        matches = [index.num_matched_tokens(request) for index in indices]
        least_match = self._min_share * request.num_prompt_tokens
        matches = [match if match >= least_match else 0 for match in matches]
        # Ordered by longest prefix, then by lowest load.
        ranks = {
            i: (-matches[i], load)
            for i, load in enumerate(loads)
            if not self.is_overloaded(load, least)
        }
        best = min(ranks.values())
        chosen = self._least_recent.choose(i for i, rank in ranks.items() if rank == best)
        indices[chosen].add(request)
        return chosen

    def is_overloaded(self, load: int, least: int) -> bool:
        """Return whether a replica with this load is overloaded and so gets no requests; `least`:
        the lowest load of all replicas.
        """
        return load > self._factor * least and load - least > self._slack

    def _indices_for(self, request: TraceRequest) -> list[PrefixIndex]:
        if self._indices is None:
            # The first request of the trace determines the tokens per entry.
            most = max(1, self._max_index_tokens // request.prefix_block_tokens)
            self._indices = [PrefixIndex(most) for _ in range(self._num_replicas)]
        return self._indices


def build_router(config: RoutingConfig, num_replicas: int, num_cache_tokens: int) -> Router:
    """Return the router of a cluster; `num_cache_tokens`: a replica's KV cache capacity, tokens."""
    match config.router:
        case RouterKind.ROUND_ROBIN:
            return RoundRobin(num_replicas)
        case RouterKind.LEAST_LOADED:
            return LeastLoaded(num_replicas)
        case RouterKind.PREFIX_AWARE:
            return PrefixAware(
                num_replicas,
                factor=config.overload_factor,
                slack=config.slack,
                max_index_tokens=config.max_index_tokens or num_cache_tokens,
                min_share=config.min_prefix_share,
            )


class _LeastRecentlyChosen:
    """Breaks ties: chooses the replica that was chosen longest ago."""

    def __init__(self, num_replicas: int) -> None:
        self._chosen_at = list(range(-num_replicas, 0))
        self._now = 0

    def choose(self, candidates: Iterable[int]) -> int:
        chosen = min(candidates, key=self._chosen_at.__getitem__)
        self._chosen_at[chosen] = self._now
        self._now += 1
        return chosen
