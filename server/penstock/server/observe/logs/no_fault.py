"""A line that gRPC writes as an error and that is none: a client left before its answer was sent.

Owns knowing that line. The answers of calls that have one are sent by gRPC itself, where no code of
ours could take the matter as what it is; and whoever does not read and hangs up could write it into
our log as often as he likes.
"""

import logging
from typing import Final

_LOGGER: Final = "grpc._cython.cygrpc"
_KIND: Final = "ExecuteBatchError"
_SENDING: Final = frozenset({"_finish_handler_with_unary_response", "_send_message"})
"""The functions that send a call's one answer."""


class NoFault(logging.Filter):
    """Holds that line back, and none but that."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line may pass."""
        if record.name != _LOGGER or not record.exc_info:
            return True
        kind, _, traceback = record.exc_info
        if kind is None or kind.__name__ != _KIND:
            return True
        while traceback is not None:
            if traceback.tb_frame.f_code.co_name in _SENDING:
                return False
            traceback = traceback.tb_next
        return True
