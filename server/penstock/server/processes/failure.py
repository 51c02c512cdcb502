"""Why a process cannot start, in one line for its operator.

Owns the wording for failures that libraries describe at length.
"""


def in_one_line(error: BaseException) -> str:
    """The cause, without traceback and line breaks."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        return f"out of memory: {text}" if text else "out of memory"
    is_worded_for_operators = type(error).__module__.startswith("penstock.")
    if text and (is_worded_for_operators or isinstance(error, ValueError | OSError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
