"""The service: its processes, the connections between them, the fronts (gRPC server processes),
text processing and the command line.

Importing this package loads none of its modules.
"""
