"""Traffic replayed in virtual time: the production engine over the simulated executor.

Owns traces, the driver of the clock, what is measured of a run and its report. Does not know
sockets or gRPC; importing it loads numpy and nothing heavier.
"""
