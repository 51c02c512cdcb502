"""A front without its transport: live requests, their streams, the engine's events."""
