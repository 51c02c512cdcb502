"""Penstock on Ray Serve: one service per replica. Serve's ingress relays calls as bytes.

- `methods`: the calls that are relayed, and their registration with Serve's proxy
- `app`: the deployment; with `ending_carrier` the only module that depends on Ray
- `relay`: relays a received call to the service of the replica
- `service`: the process of that service
- `parent_guard`: ends that process when the replica dies
- `load`: the load of that service
- `scaling`: the number of replicas for that load
"""
