"""The errors that a caller gets."""


class RequestError(RuntimeError):
    """One request failed; the engine still works."""


class CppExecutorError(RuntimeError):
    """The engine itself failed."""

    def __init__(self, message: str | None = None) -> None:
        self.message = message
        self.stack_trace = ""
        super().__init__(message)
