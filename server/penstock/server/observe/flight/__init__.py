"""The flight recorder: the last steps of an engine, in shared memory that remains after a crash."""
