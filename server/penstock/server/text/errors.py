"""Defines the exceptions of text processing. They do not depend on gRPC status codes."""


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
    """The chat has tools or tool calls, and the chat template has no variable `tools`.

    `field` is the field of the chat that has them: "tools", or "messages[2].tool_calls".
    """

    def __init__(self, field: str) -> None:
        super().__init__("the model's chat template does not support tools")
        self.field = field


class BadTemplateArgument(TextError):
    """An argument for the chat template is not a variable of the template, or is one that clients
    may not set."""


class WindowTooSmall(TextError):
    """The part of a chat that is always kept exceeds the requested window. This part consists of
    the leading system and developer messages and the last turn (usually from the last user message
    on)."""


class ControlTokenError(TextError):
    """A control token in the text cannot be encoded as ordinary text: it cannot be marked (see
    `control_tokens.py`), or the text becomes a control token although it was marked."""


class TooManyTokens(TextError):
    """The text has more tokens than allowed. It has at least `num_tokens` tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"has at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class TooMuchText(TextError):
    """With this text, the tenant's texts in the tokenizer pool would exceed `max_bytes`.

    `retry_after_s` is the estimated time, in seconds, until the tenant's other texts in the pool
    are tokenised.
    """

    def __init__(self, *, max_bytes: int, retry_after_s: float) -> None:
        super().__init__(f"the texts that wait to be tokenised would exceed {max_bytes} bytes")
        self.max_bytes = max_bytes
        self.retry_after_s = retry_after_s
