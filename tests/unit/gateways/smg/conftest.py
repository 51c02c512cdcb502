"""Fixtures of the gateway protocol's tests: the protocol's generated code."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("smg_grpc_proto") else ["test_smg_*.py"]
