"""Defines the exceptions of text processing, which do not depend on gRPC status codes."""


class ModelFilesError(Exception):
    """The folder of a model is invalid. The message names the file and the error."""


class TextError(Exception):
    """The text of a client is invalid. The message may be sent to the client, because it quotes no
    prompt."""


class ChatTemplateError(TextError):
    """The chat template rejected the chat, raised an exception, or rendered too much text."""


class ChatTemplateMissing(TextError):
    """The model has no chat template."""


class ToolsUnsupported(TextError):
    """The chat template has no variable `tools`."""


class BadTemplateArgument(TextError):
    """The chat template has no such variable, or a client may not set it as an argument."""


class WindowTooSmall(TextError):
    """The part of a chat that is always kept exceeds the requested window. This part consists of
    the leading system and developer messages and the last turn (usually from the last user message
    on)."""


class ControlTokenError(TextError):
    """A control token in the text cannot be encoded as ordinary text: it cannot be marked (see
    `control_tokens.py`), or the text becomes a control token although it was marked."""


class TooManyTokens(TextError):
    """The text has more tokens than allowed. `num_tokens` is a lower bound of their number."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"has at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class TooMuchText(TextError):
    """With this text, the tenant's texts in the tokenizer pool would exceed `max_bytes`.

    `retry_after_s` is the estimated time until the tenant's present texts are tokenised, in
    seconds.
    """

    def __init__(self, *, max_bytes: int, retry_after_s: float) -> None:
        super().__init__(f"the texts that wait to be tokenised would exceed {max_bytes} bytes")
        self.max_bytes = max_bytes
        self.retry_after_s = retry_after_s
