"""Gateways of others in front of Penstock: the smg gateway's contract, and Ray Serve.

They use the service's parts; the service finds them as entry points and imports nothing of them.
"""
