"""Defines the deployment: each replica runs one Penstock service and relays calls to it.

Implements the methods that Serve calls: one for each RPC, and one each for the health check, the
load and the shutdown of a replica. This module and `ending_carrier` are the only ones that depend
on Ray.
"""

# Ray is installed by an extra, and is only partly typed.
# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import ray
from ray import serve

from penstock.gateway.ray.ending_carrier import (
    EndingCarrier,
    EndingMethod,
    RawMessage,
    ending_method,
)
from penstock.gateway.ray.load import LoadGauge
from penstock.gateway.ray.methods import METHODS, Method
from penstock.gateway.ray.relay import CallStatus, Metadata, Relay, UnaryResult, forwarded_metadata
from penstock.gateway.ray.service import ReplicaService, Settings, settings_of

logger = logging.getLogger("ray.serve")
_CANCEL = METHODS["Cancel"]
_BROADCAST_TIMEOUT_S = 5.0

REPLICA_TRAILER = "penstock-replica"
"""Trailer with the id of the replica that served a call, as in Serve's logs and metrics."""

DEPLOYMENT: dict[str, Any] = {
    "name": "Penstock",
    # Requests queue in the engine, which orders them by urgency and rejects them with details.
    "max_ongoing_requests": 1000,
    "health_check_period_s": 5.0,
    # This includes the end of streams and the shutdown of the service.
    "graceful_shutdown_timeout_s": 120.0,
}
"""Defaults of the deployment; a config file may set other values."""


class PenstockReplica:
    """A replica of the deployment. It has one service, to which it relays calls. `_add_methods`
    adds a method for each RPC, with the RPC's name. The constructor starts the service, and raises
    the same errors as the constructor of `ReplicaService`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._service = ReplicaService(
            settings.serve_options, start_timeout_s=settings.start_timeout_s
        )
        logger.info("penstock serve is process %d, on %s", self._service.pid, self._service.address)
        self.relay = Relay(self._service.address)
        self._gauge = LoadGauge(self._service.operations)

    def check_health(self) -> None:
        """Raise ReplicaServiceFailed if the service has ended. Called by Serve; it replaces a
        replica if the check fails."""
        self._service.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of the service, from which `QueueTimePolicy` computes the number of
        replicas. Called by Serve. Raises grpc.aio.AioRpcError if the service does not respond."""
        return (await self._gauge.read()).figures()

    async def Cancel(self, data: bytes, grpc_context: Any) -> RawMessage:
        """Cancel a request on the replica that has it. Any replica may receive the call: it tries
        its own service first, and then all replicas if that service does not have the request.
        """
        metadata = forwarded_metadata(grpc_context.invocation_metadata())
        result = await self.relay.unary(_CANCEL, data, metadata)
        if result.status.code is grpc.StatusCode.NOT_FOUND:
            result = await self._cancel_elsewhere(data, metadata) or result
        return _raw_message(result, grpc_context)

    async def cancel_here(self, data: bytes, metadata: Metadata) -> UnaryResult:
        """Cancel a request of this replica and return the result. Called by the replica that
        received the call."""
        return await self.relay.unary(_CANCEL, data, metadata)

    def about(self) -> dict[str, str | int]:
        """Return the node, processes and addresses of this replica, for operators:
        `handle.broadcast("about")`."""
        return {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "service_pid": self._service.pid,
            "address": self._service.address,
            "operations": self._service.operations,
        }

    async def __del__(self) -> None:
        """Drain the service. Called by Serve when the replica stops: when no calls are open, or
        when the time for them has expired."""
        if not hasattr(self, "_gauge"):
            return  # The service has never started.
        await asyncio.to_thread(self._service.drain, self._settings.stop_timeout_s)
        await self._gauge.close()
        await self.relay.close()

    async def _cancel_elsewhere(self, data: bytes, metadata: Metadata) -> UnaryResult | None:
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        asked = handle.broadcast("cancel_here", data, metadata)
        # A replica that dies meanwhile has no requests to cancel, but other replicas may have some.
        results: list[UnaryResult | BaseException] = await asked.results_async(
            timeout_s=_BROADCAST_TIMEOUT_S, return_exceptions=True
        )
        known = (each for each in results if isinstance(each, UnaryResult))
        return next((a for a in known if a.status.code is not grpc.StatusCode.NOT_FOUND), None)


def _unary(method: Method) -> Any:
    async def relayed(self: PenstockReplica, data: bytes, grpc_context: Any) -> RawMessage:
        metadata = forwarded_metadata(grpc_context.invocation_metadata())
        return _raw_message(await self.relay.unary(method, data, metadata), grpc_context)

    return relayed


def _stream(method: Method) -> Any:
    async def relayed(
        self: PenstockReplica, data: bytes, grpc_context: Any
    ) -> AsyncGenerator[RawMessage | EndingCarrier]:
        metadata = forwarded_metadata(grpc_context.invocation_metadata())
        items = self.relay.stream(method, data, metadata)
        async with contextlib.aclosing(_raw_items(items, grpc_context)) as handed_over:
            async for item in handed_over:
                yield item

    return relayed


def _bidirectional(method: Method) -> Any:
    async def relayed(
        self: PenstockReplica, requests: AsyncIterator[bytes], grpc_context: Any
    ) -> AsyncGenerator[RawMessage | EndingCarrier]:
        metadata = forwarded_metadata(grpc_context.invocation_metadata())
        items = self.relay.bidirectional(method, requests, metadata)
        async with contextlib.aclosing(_raw_items(items, grpc_context)) as handed_over:
            async for item in handed_over:
                yield item

    return relayed


def _raw_message(result: UnaryResult, grpc_context: Any) -> RawMessage:
    _set_status(result.status, grpc_context)
    return RawMessage(result.data)


async def _raw_items(
    items: AsyncGenerator[bytes | CallStatus], grpc_context: Any
) -> AsyncGenerator[RawMessage | EndingCarrier]:
    async with contextlib.aclosing(items):
        async for item in items:
            if isinstance(item, bytes):
                yield RawMessage(item)
                continue
            _set_status(item, grpc_context)
            method = ending_method()
            if method is EndingMethod.CARRIER:
                yield EndingCarrier(item.code, item.message)
            elif method is EndingMethod.EXCEPTION and item.code is not grpc.StatusCode.OK:
                raise RuntimeError(item.message)  # Serve takes the status from the context.


def _set_status(status: CallStatus, grpc_context: Any) -> None:
    replica = serve.get_replica_context().replica_id.unique_id
    grpc_context.set_trailing_metadata([*status.trailers, (REPLICA_TRAILER, replica)])
    if status.code is not grpc.StatusCode.OK:
        grpc_context.set_code(status.code)
        grpc_context.set_details(status.message)


def _add_methods() -> None:
    makers = {(False, False): _unary, (False, True): _stream, (True, True): _bidirectional}
    for method in METHODS.values():
        if not hasattr(PenstockReplica, method.name):
            relayed = makers[method.is_request_stream, method.is_response_stream](method)
            relayed.__name__ = method.name
            relayed.__qualname__ = f"{PenstockReplica.__qualname__}.{method.name}"
            setattr(PenstockReplica, method.name, relayed)


_add_methods()


def build(args: dict[str, Any], **options: Any) -> Any:
    """Return the application, for `import_path: penstock.gateway.ray.app:build`.

    See `Settings` for `args`. `options` are Serve's options of the deployment, for callers in
    Python; in a config file they are under `deployments`. Raises ValueError naming the argument, if
    one is invalid.
    """
    deployment = serve.deployment(PenstockReplica).options(**{**DEPLOYMENT, **options})
    return deployment.bind(settings_of(args))
