"""Finds environment variables that no command reads; most likely their names are misspelt."""

import difflib
from collections.abc import Mapping

from penstock.server.cli.connection import ADDRESS_VARIABLE, OPERATIONS_VARIABLE
from penstock.server.cli.connection_options import CONNECTION_VARIABLES
from penstock.server.settings.json_values import nearest
from penstock.server.settings.table import ENVIRONMENT_PREFIX, variable_of

CONFIG_VARIABLE = variable_of("config")
_OF_COMMANDS = {ADDRESS_VARIABLE, OPERATIONS_VARIABLE, *CONNECTION_VARIABLES, CONFIG_VARIABLE}
_OF_KUBERNETES = tuple(
    variable_of(name + kind)
    for name in ("", "METRICS_", "OPERATIONS_")
    for kind in ("SERVICE_", "PORT_")
)
"""Prefixes of the variables that Kubernetes sets for services called penstock, penstock-metrics or
penstock-operations."""


_MIN_SIMILARITY = 0.82
"""Above the similarity of OPERATIONS_PORT, a setting, to OPERATIONS."""


def misspelling_warnings(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable whose name resembles one that the commands read.

    The settings of the service are not imported, because that takes 0.15 s.
    """
    known = [name.removeprefix(ENVIRONMENT_PREFIX) for name in _OF_COMMANDS]
    warnings: list[str] = []
    for name in sorted(environment.keys() - _OF_COMMANDS):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX)
            for meant in difflib.get_close_matches(key, known, n=1, cutoff=_MIN_SIMILARITY):
                warnings.append(_warning(name, f"; did you mean {variable_of(meant)}?"))
    return warnings


def unknown_variable_warnings(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each of `unknown_variables`, with the most similar known name."""
    return [_warning(name, nearest(name, _known())) for name in unknown_variables(environment)]


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return environment variables with the prefix PENSTOCK_ that are not settings, that no command
    reads, and that Kubernetes does not set.
    """
    return sorted(
        name
        for name in environment.keys() - _known()
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(_OF_KUBERNETES)
    )


def _known() -> set[str]:
    from penstock.server.config import SETTINGS

    return _OF_COMMANDS | {item.variable for item in SETTINGS}


def _warning(name: str, suggestion: str) -> str:
    return f"{name} is set but is not a known setting{suggestion}"
