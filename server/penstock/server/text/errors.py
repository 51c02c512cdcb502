"""What can go wrong with text. Owns the error types; knows nothing of statuses."""


class ModelFilesError(Exception):
    """A model's folder cannot be used: the message names the file and what is wrong with it."""


class TextError(Exception):
    """A client's text cannot be used. The message is safe to send: it quotes no content."""


class ChatTemplateError(TextError):
    """The chat template refused the dialogue, failed on it, or made too much of it."""


class ChatTemplateMissing(TextError):
    """The model has no chat template."""


class WindowTooSmall(TextError):
    """Not even the last turn of a dialogue fits the window that was asked for."""


class ControlTokenError(TextError):
    """The text would become a control token in spite of all precautions."""
