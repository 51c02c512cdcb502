"""The service: its processes, the link between them, the gRPC front, text, the command line.

Importing this package loads nothing.
"""
