"""The engine loop and its parts."""
