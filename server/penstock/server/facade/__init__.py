"""Contracts of others, served over the same front: HTTP gateways that know nothing of ours."""
