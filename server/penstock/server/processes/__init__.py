"""The processes of a service: the supervisor and its child processes."""
