"""Converts protobuf requests to validated Python values, with one module per group of options."""
