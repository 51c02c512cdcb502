"""Reports the connections of a gRPC server with channelz, one line per connection.

Independent of Penstock: works with any server that has channelz. If several processes share one
port, as Penstock's fronts (gRPC server processes) do, the report covers only the process that
accepted the connection of this program.

    python connections.py 127.0.0.1:50051
"""

import argparse
import ipaddress
import sys
from typing import Any, cast

import grpc
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

_DEADLINE_S = 10.0


def server_lines(server: channelz_pb2.Server, stub: Any) -> list[str]:
    """Return one line about the server, and one line for each connection in the first page of
    GetServerSockets. Raises grpc.RpcError."""
    data = server.data
    lines = [
        f"server {server.ref.server_id}: {data.calls_started} calls, {data.calls_failed} failed,"
        f" listens on {', '.join(socket.name for socket in server.listen_socket)}"
    ]
    page = stub.GetServerSockets(
        channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id), timeout=_DEADLINE_S
    )
    for ref in page.socket_ref:
        request = channelz_pb2.GetSocketRequest(socket_id=ref.socket_id)
        try:
            socket = stub.GetSocket(request, timeout=_DEADLINE_S).socket
        except grpc.RpcError as error:
            if cast(Any, error).code() is grpc.StatusCode.NOT_FOUND:
                continue  # The connection was closed meanwhile.
            raise
        remote = socket.remote.tcpip_address
        host = str(ipaddress.ip_address(remote.ip_address)) if remote.ip_address else ref.name
        lines.append(
            f"  from {host}:{remote.port}: {socket.data.streams_started} streams,"
            f" {socket.data.messages_sent} messages out, {socket.data.messages_received} in"
        )
    return lines


def main(argv: list[str]) -> int:
    """Run the program and return the exit code."""
    parser = argparse.ArgumentParser(description="Show the connections of a gRPC server.")
    parser.add_argument("address", help="HOST:PORT")
    args = parser.parse_args(argv)
    with grpc.insecure_channel(args.address) as channel:
        stub = cast(Any, channelz_pb2_grpc).ChannelzStub(channel)
        try:
            request = channelz_pb2.GetServersRequest()
            for server in stub.GetServers(request, timeout=_DEADLINE_S).server:
                print("\n".join(server_lines(server, stub)))
        except grpc.RpcError as error:
            call = cast(Any, error)
            print(f"{call.code().name}: {call.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
