"""Adapters for gateways of other projects in front of Penstock: smg (an OpenAI-compatible gateway
to many workers) and Ray Serve.

The packages import modules of the server. The server does not import them: it finds the adapter for
smg by an entry point.
"""
