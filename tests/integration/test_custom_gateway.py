"""A gateway package from outside the server supplies a service, its permissions and its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio

from penstock.server.front.config import FrontConfig
from penstock.server.rpc.handlers import Context, HandlerWrapper
from penstock.server.security.rights import Right
from penstock.server.text.model_text import ModelText
from support.fronts import serving
from support.security_files import ACME, OPERATOR, SecurityFiles, bearer_metadata
from support.timeout import TEST_TIMEOUT_S

SERVICE = "acme.v1.Gateway"


class AcmeGateway:
    """A `GatewayService` with three methods, each of which returns its request's bytes."""

    name = SERVICE
    rights: ClassVar[dict[str, Right | None]] = {
        f"/{SERVICE}/Ping": None,
        f"/{SERVICE}/Generate": Right.GENERATE,
        f"/{SERVICE}/Drain": Right.OPERATIONS_WRITE,
    }

    def handlers(self, wrapper: HandlerWrapper) -> grpc.GenericRpcHandler:
        names = [path.rpartition("/")[2] for path in self.rights]
        methods = {name: wrapper.unary(name, self._echo) for name in names}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _echo(self, data: bytes, context: Context) -> bytes:
        del context
        return data


async def test_its_methods_require_the_rights_that_it_names(
    text: ModelText, tmp_path: Path
) -> None:
    async with serving(
        text,
        FrontConfig(acceptance_delay_s=0.0),
        gateway=lambda front, access: AcmeGateway(),
        security=SecurityFiles(tmp_path).tokens(),
    ) as served:

        async def outcome(method: str, token: str | None) -> grpc.StatusCode:
            call: Any = served.channel.unary_unary(f"/{SERVICE}/{method}")
            metadata = None if token is None else bearer_metadata(token)
            try:
                assert await call(b"words", timeout=TEST_TIMEOUT_S, metadata=metadata) == b"words"
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        code = grpc.StatusCode
        assert await outcome("Ping", None) is code.OK
        assert await outcome("Generate", None) is code.UNAUTHENTICATED
        assert await outcome("Generate", ACME) is code.OK
        assert await outcome("Drain", ACME) is code.PERMISSION_DENIED
        assert await outcome("Drain", OPERATOR) is code.OK
        assert await outcome("Unlisted", ACME) is code.UNIMPLEMENTED
