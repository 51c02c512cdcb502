"""The default address of the commands."""

import pytest

from penstock.client import DEFAULT_OPERATIONS_ADDRESS
from penstock.server.cli.connection import default_address, default_operations_address


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "127.0.0.1:50051"),
        ({"PENSTOCK_PORT": "7000"}, "127.0.0.1:7000"),
        ({"PENSTOCK_PORT": "tcp://10.0.0.1:50051"}, "127.0.0.1:50051"),
        # No port: the command reports that.
        ({"PENSTOCK_PORT": "many"}, "127.0.0.1:many"),
        ({"PENSTOCK_PORT": "7000", "PENSTOCK_ADDRESS": "there:1"}, "there:1"),
    ],
)
def test_it_is_where_serve_would_listen(environment: dict[str, str], address: str) -> None:
    assert default_address(environment) == address


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, DEFAULT_OPERATIONS_ADDRESS),
        ({"PENSTOCK_PORT": "7000"}, "127.0.0.1:7001"),
        ({"PENSTOCK_PORT": "tcp://10.0.0.1:50051"}, "127.0.0.1:50052"),
        ({"PENSTOCK_PORT": "7000", "PENSTOCK_OPERATIONS_PORT": "9000"}, "127.0.0.1:9000"),
        ({"PENSTOCK_OPERATIONS_PORT": "off"}, "127.0.0.1:50052"),
        ({"PENSTOCK_PORT": "7000", "PENSTOCK_OPERATIONS": "there:1"}, "there:1"),
    ],
)
def test_operations_are_one_port_above(environment: dict[str, str], address: str) -> None:
    assert default_operations_address(environment) == address
