"""Observability: records of requests and steps, and the metrics, traces and logs derived from
them."""
