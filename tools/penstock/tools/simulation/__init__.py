"""Replays traffic in virtual time, with the production engine over the simulated executor.

Owns traces, the virtual clock, the measurements of a run and its report. Uses no sockets and no
gRPC; importing it loads nothing heavier than numpy.
"""
