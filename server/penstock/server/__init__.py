"""The service: its processes, the connections between them, the gRPC front end, text processing and
the command line.

Importing this package loads none of its modules.
"""
