"""Errors raised while a model is loaded, before its first step. The messages are for the
operator.
"""


class ModelLoadError(Exception):
    """The model folder cannot be loaded; the message contains the folder and the reason."""


class UnsupportedModel(Exception):
    """The executor does not support the model, its checkpoint's number format, or a setting with
    this model.
    """
