"""The flight recorder: the last steps of an engine, in memory that outlives it."""
