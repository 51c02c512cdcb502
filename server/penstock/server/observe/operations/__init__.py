"""Operators' view of the service: a snapshot, live requests, and commands."""
