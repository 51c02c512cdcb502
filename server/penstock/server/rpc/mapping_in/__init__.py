"""Converts protobuf requests to validated domain values, one option group per module."""
