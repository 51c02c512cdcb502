"""The errors of ports that cannot be reserved."""

from __future__ import annotations

import socket

import pytest

from penstock.server.processes.service_sockets import PortUnavailable, reserve_port


def test_an_address_of_another_machine_names_the_host_flag() -> None:
    # An address of documentation (RFC 5737): no machine has it.
    with pytest.raises(PortUnavailable, match=r"^--host: cannot listen on 192\.0\.2\.1:0: "):
        reserve_port("192.0.2.1", 0, flag="--port", host_flag="--host")


def test_a_port_in_use_names_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            PortUnavailable, match=rf"^--port: cannot listen on 127\.0\.0\.1:{port}: "
        ):
            reserve_port("127.0.0.1", port, flag="--port", host_flag="--host")
