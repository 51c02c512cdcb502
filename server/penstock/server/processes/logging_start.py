"""How the processes of a service begin to log: alike, as its settings say."""

from penstock.server.config import ServerConfig
from penstock.server.observe.logs import configure_logging


def start_logging(process: str, server: ServerConfig) -> None:
    """From now on, as `process`."""
    configure_logging(
        process,
        server.log_level,
        form=server.log_format,
        has_foreign_text=server.log_foreign_text,
    )
