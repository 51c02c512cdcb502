"""Penstock on Ray Serve: one service per replica, its calls relayed as bytes by Serve's ingress.

penstock_ray.methods   the calls that go through, and what Serve's proxy is given of them
penstock_ray.app       the deployment; the only module that knows Ray
penstock_ray.relay     a call that came in, made again to the replica's own service
penstock_ray.service   the process of that service
penstock_ray.load      what it says of its load
penstock_ray.scaling   how many replicas that asks for
"""
