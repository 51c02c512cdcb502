"""Programs around the service: simulate, plan, bench, timeline, verify, demo.

They import the server and the client, which do not import them.
"""
