"""The Penstock service: its processes and the connections between them, text processing, and the
command line.

Importing this package loads none of its modules.
"""
