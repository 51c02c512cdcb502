"""Configures logging of a process from the settings of the service."""

from penstock.server.config import ServerConfig
from penstock.server.observe.logs import configure_logging


def start_logging(process: str, server: ServerConfig) -> None:
    """Configure logging for `process`."""
    configure_logging(
        process,
        server.log_level,
        form=server.log_format,
        has_foreign_text=server.log_foreign_text,
    )
