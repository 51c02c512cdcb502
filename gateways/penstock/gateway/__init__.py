"""Gateways of other projects in front of Penstock: the protocol of smg (an OpenAI-compatible
gateway to many workers), and Ray Serve.

They import modules of the service, which does not import them: it finds the protocol of smg by an
entry point.
"""
