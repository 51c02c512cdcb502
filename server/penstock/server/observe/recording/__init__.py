"""Recording of a service's workload: durations of steps, and requests."""
