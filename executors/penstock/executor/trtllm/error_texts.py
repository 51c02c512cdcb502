"""Classifies the engine's error texts: an invalid request, or an error of the engine.

The engine raises the same exception class for all failed requests, so known phrases are searched
for in the text. A server error must not be reported as a client error: a text means an invalid
request only if it contains a known phrase and no word for an engine error such as "CUDA". A text
may quote the request's constraint, so words for an engine error that the constraint contains are
ignored.
"""

import re
from typing import Final

# The format since NVIDIA PR #9078; `rest` is the grammar compiler's text, which quotes the
# constraint.
_GUIDED: Final = re.compile(r"\s*guided decoding error:\s*(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_FAULTS: Final = re.compile(
    r"\b(cuda\w*|cublas\w*|nccl\w*|mpi|out of memory|bad_alloc|internal error|kernel|traceback"
    r"|forward)\b",
    re.IGNORECASE,
)
_INVALID: Final = re.compile(
    r"token id out of range"
    r"|prompt length \(.*\).* (should not|must not|cannot) (be larger than|exceed)"
    r"|(prompt|input) length.* exceeds? (the )?max"
    r"|exceeds? max_(seq_len|input_len|num_tokens)"
    r"|should not be larger than max_(seq_len|input_len|num_tokens)"
    r"|`?(default_)?max_tokens`? .*must be greater than 0"
    r"|invalid (json schema|grammar|regex|guided decoding)"
    r"|(failed to compile|could not compile|cannot compile) (the )?(json schema|grammar|regex)"
    r"|guided decoding is not enabled",
    re.IGNORECASE,
)
# Names and texts of errors that make a CUDA context unusable.
_FATAL: Final = re.compile(
    r"cudaErrorIllegalAddress|cudaErrorLaunchFailure|cudaErrorAssert|cudaErrorECCUncorrectable"
    r"|device-side assert|illegal memory access|unspecified launch failure"
    r"|misaligned address|uncorrectable ECC error|\bunrecoverable\b",
    re.IGNORECASE,
)


def is_invalid_request(message: str, quoted: str = "") -> bool:
    """Return whether the text reports an invalid request, an invalid constraint included. `quoted`:
    the part of the request that the text may quote.
    """
    if is_invalid_constraint(message, quoted):
        return True
    return _INVALID.search(message) is not None and not _has_unquoted(_FAULTS, message, quoted)


def is_invalid_constraint(message: str, quoted: str = "") -> bool:
    """Return whether the text reports an invalid structured-output constraint.

    `quoted`: the text of the constraint; matches inside it are ignored, because the message may
    quote it.
    """
    guided = _GUIDED.match(message)
    return guided is not None and not _has_unquoted(_FAULTS, guided["rest"], quoted)


def is_fatal(message: str, quoted: str = "") -> bool:
    """Return whether the text reports an error that makes the engine unusable, even if it still
    responds. `quoted`: as in `is_invalid_constraint`.
    """
    return _has_unquoted(_FATAL, message, quoted)


def _has_unquoted(words: re.Pattern[str], message: str, quoted: str) -> bool:
    """Return whether `message` has a match of `words` that does not occur in `quoted`, ignoring
    case.
    """
    quoted = quoted.lower()
    return any(found[0].lower() not in quoted for found in words.finditer(message))
