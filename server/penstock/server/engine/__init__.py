"""The engine process: its loop, its side of the fronts' frames, and quarantine of requests."""
