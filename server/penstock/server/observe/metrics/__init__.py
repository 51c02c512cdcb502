"""Metrics for Prometheus, made in the observer process."""
