"""What can go wrong before the first step: errors that an operator reads and acts on."""


class ModelLoadError(Exception):
    """The model folder cannot be loaded; the message names the folder and what is wrong."""


class UnsupportedModel(Exception):
    """The model asks for something that paged attention does not do; serving it would be wrong."""
