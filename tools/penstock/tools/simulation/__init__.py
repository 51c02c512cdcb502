"""Replays traffic in virtual time, with the production scheduler and the simulated executor.

Contains traces, the virtual clock, the measurements of a run and its report. Uses no sockets and no
gRPC; the largest import is numpy.
"""
