"""The error raised if an executor's dependencies cannot be used."""


class ExecutorUnavailable(Exception):
    """A dependency of the executor is not installed, cannot be loaded, or lacks a class that the
    executor needs; the message names the package.
    """
