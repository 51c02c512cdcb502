"""A Griffe extension that removes the arguments for tests from the reference of the Python client.

The clients accept `settings` and `sleep`, with which tests control time. mkdocstrings (mkdocs.yml)
loads this file.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Function

ARGUMENTS = ("settings", "sleep")
# Their lines in "Args", and the half sentence about `sleep` in the blocking clients.
_TEXT = re.compile(rf"^ +(?:{'|'.join(ARGUMENTS)}): .*\n?|, but `sleep`\s+blocks", re.M)


class ReferenceFilter(Extension):
    """Removes the arguments for tests from constructors."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Remove the arguments from the signature and from the docstring of a constructor."""
        if func.name != "__init__":
            return
        for name in ARGUMENTS:
            if name in func.parameters:
                del func.parameters[name]
        if func.docstring is not None:
            func.docstring.value = _TEXT.sub("", func.docstring.value)
