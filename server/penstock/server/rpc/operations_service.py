"""OperationsService: every method is still to come, and says so by name."""

import grpc

from penstock.server.rpc.handlers import HandlerWrapper
from penstock.server.rpc.unimplemented import unimplemented_handlers

SERVICE_NAME = "penstock.v1.OperationsService"


def operations_handlers(wrapper: HandlerWrapper) -> "grpc.GenericRpcHandler":
    """All methods of the service."""
    return grpc.method_handlers_generic_handler(
        SERVICE_NAME, unimplemented_handlers(SERVICE_NAME, wrapper)
    )
