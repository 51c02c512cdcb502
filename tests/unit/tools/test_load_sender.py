"""Which addresses are on this machine, and to which load may be sent."""

import pytest

from penstock.tools.bench.sender import SenderConfig, is_local


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "127.0.0.1",
        "127.0.0.1:50051",
        "127.9.9.9:1",
        "[::1]:50051",
        "unix:/run/penstock",
        "unix-abstract:penstock",
        "dns:///localhost:50051",
        "ipv4:127.0.0.1:1,127.0.0.2:2",
        "ipv6:[::1]:1",
    ],
)
def test_addresses_of_this_machine_are_local(address: str) -> None:
    assert is_local(address)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "0.0.0.0:50051",
        "example.org:50051",
        "localhost.example.org:1",
        "[2001:db8::1]:50051",
        "dns:///example.org:50051",
        "dns://127.0.0.1/example.org",
        "ipv4:127.0.0.1:1,10.0.0.1:2",
        "xds:///localhost",
        "vsock:3:50051",
    ],
)
def test_other_addresses_are_not_local(address: str) -> None:
    assert not is_local(address)


def test_bad_settings_name_their_field() -> None:
    with pytest.raises(ValueError, match=r"^address"):
        SenderConfig(address="a:b:c")
    with pytest.raises(ValueError, match=r"^num_channels"):
        SenderConfig(address="localhost", num_channels=0)
