"""Results, requests and the channel between the caller and the engine."""
