"""The error for an executor whose dependencies are not installed. Knows no executor."""


class ExecutorUnavailable(Exception):
    """This installation lacks what the executor needs; the message names what to install."""
