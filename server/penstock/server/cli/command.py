"""Where commands hang themselves in. A command is a module with `add_parser` and `run`.

Owns the face of argparse's collection of commands, for which argparse has no public name.
"""

import argparse
from typing import Any, Protocol


class Subparsers(Protocol):
    """What `ArgumentParser.add_subparsers` returns, as far as commands use it."""

    def add_parser(self, name: str, **settings: Any) -> argparse.ArgumentParser:
        """Add a command; `settings` are those of ArgumentParser, and `help`."""
        ...
