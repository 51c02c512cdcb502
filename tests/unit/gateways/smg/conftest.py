"""Excludes the tests of the gateway protocol if its generated code, `smg_grpc_proto`, is not
installed.
"""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("smg_grpc_proto") else ["test_smg_*.py"]
