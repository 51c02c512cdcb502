"""Third-party gateways in front of Penstock: the protocol of smg, and Ray Serve.

They import modules of the service; the service finds them as entry points and imports none of them.
"""
