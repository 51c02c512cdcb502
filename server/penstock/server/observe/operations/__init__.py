"""What operators look at: a snapshot of the service, its live requests, its levers."""
