"""Implements the gRPC layer: the services, the server, statuses, and the conversion between bytes
and Python values."""
