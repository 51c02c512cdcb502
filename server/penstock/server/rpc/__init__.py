"""The gRPC layer: converts bytes to domain values and back; statuses, services, the server."""
