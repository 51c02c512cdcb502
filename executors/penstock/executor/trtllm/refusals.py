"""Which failures of a single request are the request's own fault.

Owns the phrases. The engine has one exception for both kinds and tells them apart in words only.
To blame the client wrongly hides a fault of ours, so only whole phrases that are known count, and
none in a text that speaks of what a request cannot cause.
"""

import re

_FAULTS = re.compile(
    r"cuda|cublas|nccl|memory|internal|assert|kernel|traceback|forward|mpi",
    re.IGNORECASE,
)
_REFUSALS = re.compile(
    r"token id out of range"
    r"|prompt length \(.*\).* (should not|must not|cannot) (be larger than|exceed)"
    r"|(prompt|input) length.* exceeds? (the )?max"
    r"|exceeds? max_(seq_len|input_len|num_tokens)"
    r"|should not be larger than max_(seq_len|input_len|num_tokens)"
    r"|invalid (json schema|grammar|regex|guided decoding)"
    r"|(failed to compile|could not compile|cannot compile) (the )?(json schema|grammar|regex)"
    r"|guided decoding is not enabled",
    re.IGNORECASE,
)


def is_refusal(message: str) -> bool:
    """Whether the engine's words say that it will not do what was asked."""
    return _REFUSALS.search(message) is not None and _FAULTS.search(message) is None
