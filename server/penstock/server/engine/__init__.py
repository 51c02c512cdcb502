"""The engine process: its loop, what it does for its fronts, and what its death is blamed on."""
