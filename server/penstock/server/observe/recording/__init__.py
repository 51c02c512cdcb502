"""Recording of a service's workload: step times and requests."""
