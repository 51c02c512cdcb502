"""Gateways of other projects in front of Penstock: the protocol of smg (an OpenAI-compatible
gateway to many workers), and Ray Serve.

The packages import modules of the server. The server does not import them: it finds the protocol of
smg by an entry point.
"""
