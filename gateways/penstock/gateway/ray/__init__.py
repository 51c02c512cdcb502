"""Penstock on Ray Serve: one service per replica, its calls relayed as bytes by Serve's ingress.

- `methods`: the calls that are relayed, and their registration with Serve's proxy
- `app`: the deployment; with `ending_carrier` the only module that depends on Ray
- `relay`: repeats a received call to the replica's own service
- `service`: the process of that service
- `load`: the load of that service
- `scaling`: the number of replicas for that load
"""
