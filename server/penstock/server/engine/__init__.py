"""The engine process: its main loop, the dispatcher for frames from fronts (front-end processes),
the streams kept for Resume, and the quarantine of requests."""
