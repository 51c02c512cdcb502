"""Results, requests and the way between the caller and the engine."""
