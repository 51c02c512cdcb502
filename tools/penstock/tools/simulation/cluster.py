"""Runs a trace through several simulated servers behind a router, and returns the result.

The replicas share one virtual time: before a request is routed, all replicas run until its arrival,
so that the router uses neither later arrivals nor results of unfinished steps.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.setting import check, setting
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.load_signal import LoadAccount
from penstock.tools.simulation.recorder import RunRecorder
from penstock.tools.simulation.replica import Replica
from penstock.tools.simulation.routing import Router, RoutingConfig, build_router
from penstock.tools.simulation.settings import SimulationConfig
from penstock.tools.simulation.simulate import (
    PROGRESS_INTERVAL_S,
    SimulationProgress,
    SimulationRun,
    infrequent_gc,
)

MAX_REPLICAS = 1024
"""Maximum number of replicas. Each needs the memory of an engine, and computing time for every
request of the trace, because all are advanced to its arrival.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Settings of a cluster: identical replicas behind a router. Raises SettingError, naming the
    field, if one is invalid.
    """

    replica: SimulationConfig
    num_replicas: int = setting(
        1, "routing", "number of replicas", name="replicas", at_least=1, at_most=MAX_REPLICAS
    )
    routing: RoutingConfig = RoutingConfig()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterRun:
    """The result of a run of several replicas.

    Attributes:
        total: All requests in order of arrival, as if served by a single server, without memory
            samples; its `wall_s` and `cpu_s` cover the whole run.
        replicas: The run of each replica that received requests; their `wall_s` and `cpu_s` also
            cover the whole run.
        numbers: For each entry of `replicas`, the replica's index in the cluster, from 0.
        routes: int64 [requests]; the index of each request's replica.
    """

    config: ClusterConfig
    total: SimulationRun
    replicas: tuple[SimulationRun, ...]
    numbers: tuple[int, ...]
    routes: NDArray[np.int64]


def simulate_cluster(
    trace: Iterable[TraceRequest],
    config: ClusterConfig,
    on_progress: Callable[[SimulationProgress], None] | None = None,
    router: Router | None = None,
) -> ClusterRun:
    """Replay a trace until every request has ended. The trace must be in order of arrival. Raises
    SimulationStuck.

    The trace is read as a stream. `on_progress` is called when requests arrive, at most twice per
    second, and at the end. `router` None: the router that the settings name.
    """
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    cluster = _Cluster(config, router)
    reported_s = start_s
    try:
        with infrequent_gc():
            for request in trace:
                cluster.offer(request)
                wall_s = time.monotonic()
                if on_progress is not None and wall_s - reported_s >= PROGRESS_INTERVAL_S:
                    reported_s = wall_s
                    on_progress(cluster.progress(wall_s - start_s))
            cluster.finish()
    finally:
        cluster.close()
    wall_s = time.monotonic() - start_s
    if on_progress is not None:
        on_progress(cluster.progress(wall_s))
    return cluster.outcome(wall_s, time.process_time() - start_cpu_s)


class _Cluster:
    """The replicas, the router in front of them, and the route of each request."""

    def __init__(self, config: ClusterConfig, router: Router | None) -> None:
        one, num = config.replica, config.num_replicas
        self._config = config
        self._router = router or build_router(
            config.routing, num, num_cache_tokens=one.num_blocks * one.block_size
        )
        routing = config.routing
        self._account = LoadAccount(num, routing.load_signal, routing.load_signal_delay_s)
        # Weight of each request when it was sent, by replica and by engine key minus one.
        self._weights: list[list[int]] = [[] for _ in range(num)]
        self._recorders = [_recorder_of(one, partial(self._note_end, i)) for i in range(num)]
        self._replicas = [Replica(one, recorder) for recorder in self._recorders]
        self._routes: list[int] = []

    def offer(self, request: TraceRequest) -> None:
        for replica in self._replicas:
            replica.run_until(request.arrival_s)
        chosen = self._router.route(request, self._account.loads(request.arrival_s))
        self._weights[chosen].append(self._account.sent(chosen, request))
        self._replicas[chosen].offer(request)
        self._routes.append(chosen)

    def _note_end(self, replica: int, end: Completed | Failed) -> None:
        self._account.ended(replica, self._weights[replica][end.key - 1], end.at_s)

    def finish(self) -> None:
        for replica in self._replicas:
            replica.finish()
        for recorder in self._recorders:
            recorder.flush()

    def close(self) -> None:
        for replica in self._replicas:
            replica.engine.close()

    def progress(self, wall_s: float) -> SimulationProgress:
        num_running = sum(len(replica.engine.running) for replica in self._replicas)
        num_unfinished = sum(replica.num_unfinished for replica in self._replicas)
        return SimulationProgress(
            now_s=max(replica.now_s for replica in self._replicas),
            wall_s=wall_s,
            num_arrived=len(self._routes),
            num_ended=sum(recorder.num_ended for recorder in self._recorders),
            num_running=num_running,
            num_waiting=num_unfinished - num_running,
        )

    def outcome(self, wall_s: float, cpu_s: float) -> ClusterRun:
        routes = np.array(self._routes, dtype=np.int64)
        numbers = tuple(i for i, recorder in enumerate(self._recorders) if len(recorder.table))
        one = self._config.replica
        total = _recorder_of(one)
        total.merge_from(self._recorders, routes)
        return ClusterRun(
            config=self._config,
            total=SimulationRun(
                config=one,
                recorder=total,
                wall_s=wall_s,
                cpu_s=cpu_s,
            ),
            replicas=tuple(
                SimulationRun(
                    config=one, recorder=self._recorders[number], wall_s=wall_s, cpu_s=cpu_s
                )
                for number in numbers
            ),
            numbers=numbers,
            routes=routes,
        )


def _recorder_of(
    config: SimulationConfig, on_end: Callable[[Completed | Failed], None] | None = None
) -> RunRecorder:
    return RunRecorder(
        slow_gap_s=config.targets.itl_s,
        timeline_bin_s=config.timeline_bin_s,
        sample_every_steps=config.sample_every_steps,
        on_end=on_end,
    )
