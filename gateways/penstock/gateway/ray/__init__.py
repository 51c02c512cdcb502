"""Penstock on Ray Serve: one service per replica, its calls relayed as bytes by Serve's ingress.

penstock.gateway.ray.methods the calls that go through, and what Serve's proxy gets of them
penstock.gateway.ray.app the deployment; the only module that knows Ray penstock.gateway.ray.relay a
call that came in, made again to the replica's own service penstock.gateway.ray.service the process
of that service penstock.gateway.ray.load its load penstock.gateway.ray.scaling the number of
replicas for it
"""
