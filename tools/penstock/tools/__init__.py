"""Command-line tools for the service: build, simulate, plan, bench, timeline, verify, demo.

This package imports the server and the client; they do not import it.
"""
