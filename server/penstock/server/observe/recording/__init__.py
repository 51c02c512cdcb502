"""Records the workload of a service: the durations of its steps, and its requests without their
text."""
