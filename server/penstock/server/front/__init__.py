"""The front (gRPC server process), independent of its transport: live requests, their streams, and
the handling of engine events."""
