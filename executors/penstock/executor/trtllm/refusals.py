"""Classifies the engine's error texts: an invalid request, or a failed engine.

Owns the phrases. The engine has one exception for everything, with different texts. Blaming the
client wrongly hides an error of ours, so only known whole phrases count, and none in a text that
names something a request cannot cause. A text may quote the request's constraint: words that
indicate an engine error count only if the constraint does not contain them.
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
_REFUSALS: Final = re.compile(
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
# Names and texts of errors after which a CUDA context is lost.
_FATAL: Final = re.compile(
    r"cudaErrorIllegalAddress|cudaErrorLaunchFailure|cudaErrorAssert|cudaErrorECCUncorrectable"
    r"|device-side assert|illegal memory access|unspecified launch failure"
    r"|misaligned address|uncorrectable ECC error|\bunrecoverable\b",
    re.IGNORECASE,
)


def is_refusal(message: str, quoted: str = "") -> bool:
    """Return whether the text blames the request. `quoted`: what it may quote of the request."""
    if is_constraint_refusal(message, quoted):
        return True
    return _REFUSALS.search(message) is not None and not _has_own(_FAULTS, message, quoted)


def is_constraint_refusal(message: str, quoted: str = "") -> bool:
    """Return whether the text blames the request's constraint."""
    guided = _GUIDED.match(message)
    return guided is not None and not _has_own(_FAULTS, guided["rest"], quoted)


def is_fatal(message: str, quoted: str = "") -> bool:
    """Return whether the engine is lost, even if it still responds."""
    return _has_own(_FATAL, message, quoted)


def _has_own(words: re.Pattern[str], message: str, quoted: str) -> bool:
    """Return whether the engine itself used one of `words`: words of the request do not count."""
    quoted = quoted.lower()
    return any(found[0].lower() not in quoted for found in words.finditer(message))
