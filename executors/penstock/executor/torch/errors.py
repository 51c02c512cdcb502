"""Errors before the first step, worded for the operator."""


class ModelLoadError(Exception):
    """The model folder cannot be loaded; the message names the folder and the fault."""


class UnsupportedModel(Exception):
    """The model needs something that paged attention does not support; its output would be
    wrong.
    """
