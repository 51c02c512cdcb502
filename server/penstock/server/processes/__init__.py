"""The processes of a service: the supervisor and what it starts."""
