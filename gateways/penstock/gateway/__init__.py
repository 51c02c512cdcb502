"""Third-party gateways in front of Penstock: the protocol of smg, and Ray Serve.

They use the service's parts; the service finds them as entry points and imports nothing of them.
"""
