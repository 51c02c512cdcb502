"""Runs Penstock on Ray Serve. Each replica starts one `penstock serve` process (its service) and
relays the calls that it receives to this process, without parsing the messages.

- `methods`: the calls that are relayed, and their registration with Serve's proxy
- `app`: the deployment; this module and `ending_carrier` are the only ones that depend on Ray
- `relay`: relays a received call to the service of the replica
- `service`: the process of that service
- `parent_guard`: ends that process when the replica dies
- `load`: the load of that service
- `scaling`: the number of replicas for that load
"""
