"""How the end of a stream is sent, which depends on the installed Ray."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from penstock.gateway.ray.ending_carrier import (
    EndingCarrier,
    EndingMethod,
    RawMessage,
    ending_method,
)


@pytest.fixture
def ray_parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Install empty modules in place of Ray Serve's modules; return them by the last component of
    their names.
    """
    names = (
        *("ray", "ray.serve", "ray.serve._private"),
        *("ray.serve._private.constants", "ray.serve._private.proxy_request_response"),
    )
    parts = {name: ModuleType(name) for name in names}
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    return {name.rpartition(".")[2]: module for name, module in parts.items()}


def test_without_rays_response_class_an_end_is_an_exception(
    ray_parts: dict[str, ModuleType],
) -> None:
    assert ending_method() is EndingMethod.EXCEPTION


def test_with_rays_response_class_an_end_is_sent_instead_of_a_message(
    ray_parts: dict[str, ModuleType],
) -> None:
    vars(ray_parts["proxy_request_response"])["ResponseStatus"] = SimpleNamespace

    assert ending_method() is EndingMethod.CARRIER
    end = EndingCarrier("a code", "why").SerializeToString()
    assert (end.code, end.message) == ("a code", "why")


def test_if_the_replica_is_the_ingress_the_method_returns(ray_parts: dict[str, ModuleType]) -> None:
    vars(ray_parts["proxy_request_response"])["ResponseStatus"] = SimpleNamespace
    vars(ray_parts["constants"])["RAY_SERVE_ENABLE_DIRECT_INGRESS"] = True

    assert ending_method() is EndingMethod.RETURN


def test_a_message_is_returned_unchanged() -> None:
    assert RawMessage(b"\x00\xff").SerializeToString() == b"\x00\xff"
