"""Errors at load, before the first step; the messages are for the operator."""


class ModelLoadError(Exception):
    """The model folder cannot be loaded; the message has the folder and the reason."""


class UnsupportedModel(Exception):
    """Paged attention does not support the model; its output would be wrong."""
