"""Whether what a facade is made of is installed.

Owns the names of the facades, and of the extra that brings their generated code. Imports none of
that: fronts do, where a facade is asked for.
"""

import importlib.util
from typing import Final

NO_FACADE: Final = "none"
SMG_FACADE: Final = "smg"
FACADES: Final = (NO_FACADE, SMG_FACADE)
_EXTRA: Final = "gateway"
_GENERATED: Final = "smg_grpc_proto"


def check_installed(facade: str) -> None:
    """Raise ValueError naming the extra where the generated code of `facade` is not there."""
    if facade != NO_FACADE and importlib.util.find_spec(_GENERATED) is None:
        raise ValueError(
            f"facade {facade} needs the package smg-grpc-proto: pip install 'penstock[{_EXTRA}]'"
        )
