"""Implements the front (gRPC server process) without its transport: holds the live requests and
their streams, and handles engine events."""
