"""The gRPC layer: services, the server, statuses, and the conversion between bytes and Python
values."""
