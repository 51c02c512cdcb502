"""Errors about text. Does not know status codes."""


class ModelFilesError(Exception):
    """A model's folder is invalid; the message names the file and the error."""


class TextError(Exception):
    """A client's text is invalid. The message is safe to send: it quotes no content."""


class ChatTemplateError(TextError):
    """The chat template refused the chat, failed on it, or its output was too large."""


class ChatTemplateMissing(TextError):
    """The model has no chat template."""


class ToolsUnsupported(TextError):
    """The chat template has no variable `tools`."""


class BadTemplateArgument(TextError):
    """The chat template has no such variable, or another field sets it."""


class WindowTooSmall(TextError):
    """The leading messages and the last turn of a chat exceed the requested window."""


class ControlTokenError(TextError):
    """The text would become a control token despite the guard."""


class TooManyTokens(TextError):
    """The text has more tokens than allowed. `num_tokens`: a lower bound."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"has at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class TooMuchText(TextError):
    """The tenant has too much text waiting to be tokenised: more than `max_bytes`."""

    def __init__(self, *, max_bytes: int, retry_after_s: float) -> None:
        super().__init__(f"{max_bytes} bytes of text are waiting already")
        self.max_bytes = max_bytes
        self.retry_after_s = retry_after_s
