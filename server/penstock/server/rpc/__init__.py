"""The gRPC edge: bytes to domain values and back, statuses, services, the server."""
