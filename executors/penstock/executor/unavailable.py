"""The error raised if an executor's dependencies are not installed."""


class ExecutorUnavailable(Exception):
    """A dependency of the executor is not installed; the message names the package to install."""
