"""Traces: records of requests become OpenTelemetry spans here, and nowhere else."""
