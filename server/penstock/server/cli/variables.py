"""Finds environment variables that no command reads; most likely their names are misspelt."""

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


def variable_warnings(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each of `unknown_variables`, with the most similar known name."""
    return [
        f"{name} is set but is not a known setting{nearest(name, _known())}"
        for name in unknown_variables(environment)
    ]


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return environment variables with the prefix PENSTOCK_ that are not settings, that no command
    reads, and that Kubernetes does not set.

    The result is empty if the settings cannot be imported, because only the client is installed.
    """
    unknown = {
        name
        for name in environment.keys() - _OF_COMMANDS
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(_OF_KUBERNETES)
    }
    # The import of the settings takes time, so it is omitted if all names are known without it.
    try:
        return sorted(unknown - _known()) if unknown else []
    except ModuleNotFoundError:
        return []


def _known() -> set[str]:
    from penstock.server.config import SETTINGS

    return _OF_COMMANDS | {item.variable for item in SETTINGS}
