"""Prometheus metrics, computed in the observer process."""
