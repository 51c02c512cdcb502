"""The engine process: its main loop, the dispatcher for frames from fronts (gRPC server processes),
the streams kept for Resume, and the quarantine of requests."""
