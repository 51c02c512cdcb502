"""Metrics for Prometheus, made in the observer process of what the others tell."""
