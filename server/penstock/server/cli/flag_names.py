"""Messages of settings' classes, with the names of flags in place of those of fields.

Owns the replacement. Which flag a field comes from is in the tables of the commands.
"""

import re
from collections.abc import Callable, Mapping


def flag_names(
    flags: Mapping[str, str], *, before: str, after: str = r"\b"
) -> Callable[[str], str]:
    """What replaces every field of `flags` in a message where the two patterns stand around it."""
    fields = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    pattern = re.compile(rf"(?P<before>{before})(?P<field>{fields}){after}")
    return lambda message: pattern.sub(
        lambda match: match["before"] + flags[match["field"]], message
    )
