"""Queries the load of a replica's service.

The number of replicas is computed from this load.
"""

from dataclasses import asdict, dataclass

import grpc
import grpc.aio

from penstock.v1 import operations_service_pb2 as pb
from penstock.v1 import operations_service_pb2_grpc as pb_grpc
from penstock.v1 import stats_pb2

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of one replica.

    `queue_time_s` is the expected wait of a request that arrives now, in seconds (see `load_of`).
    `busy_share` is the used share of the slots, from 0 to 1. `num_pending` is the number of
    requests in the queue.
    """

    queue_time_s: float
    busy_share: float
    num_pending: int

    def figures(self) -> dict[str, float]:
        """Return the figures by name, in the form that Serve receives."""
        return asdict(self)


class LoadGauge:
    """Queries the operations service at `address`. Must be created on the event loop that uses
    it."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = pb_grpc.OperationsServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def read(self) -> ReplicaLoad:
        """Return the current load. Raises grpc.aio.AioRpcError if the service does not respond."""
        answer = await self._stub.GetStats(pb.GetStatsRequest(), timeout=_TIMEOUT_S)
        return load_of(answer.stats)


def load_of(stats: stats_pb2.ServerStats) -> ReplicaLoad:
    """Return the maximum queue time and busy share over all models, and the sum of pending
    requests.

    The queue time of a model is the predicted wait. If the service reports none, it is the median
    wait of the requests that ended in the last minute; 0 if there are none.
    """
    loads = [_model_load(model) for model in stats.models]
    return ReplicaLoad(
        queue_time_s=max((load.queue_time_s for load in loads), default=0.0),
        busy_share=max((load.busy_share for load in loads), default=0.0),
        num_pending=sum(load.num_pending for load in loads),
    )


def _model_load(model: stats_pb2.ModelStats) -> ReplicaLoad:
    wait = (
        model.estimated_queue_duration
        if model.HasField("estimated_queue_duration")
        else model.queue.p50
    )
    return ReplicaLoad(
        queue_time_s=wait.ToTimedelta().total_seconds(),
        busy_share=min(1.0, model.num_processing / max(1, model.max_num_seqs)),
        num_pending=model.num_pending,
    )
