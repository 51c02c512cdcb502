"""What the engine's error texts mean: the request's own fault, or the end of the engine.

Owns the phrases. The engine has one exception for everything and differs in words only. To blame
the client wrongly hides a fault of ours, so only whole phrases that are known count, and none in a
text that names what a request cannot cause. A text may quote the request's constraint: words that
decide against the engine count only where the constraint does not have them.
"""

import re
from typing import Final

# Since NVIDIA PR #9078; the rest is the grammar compiler's own text, which quotes the constraint.
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
# Errors after which a CUDA context answers nothing more, by their names and by their texts.
_FATAL: Final = re.compile(
    r"cudaErrorIllegalAddress|cudaErrorLaunchFailure|cudaErrorAssert|cudaErrorECCUncorrectable"
    r"|device-side assert|illegal memory access|unspecified launch failure"
    r"|misaligned address|uncorrectable ECC error|\bunrecoverable\b",
    re.IGNORECASE,
)


def is_refusal(message: str, quoted: str = "") -> bool:
    """Whether the text says that the request is at fault. `quoted`: what it may quote of it."""
    if is_constraint_refusal(message, quoted):
        return True
    return _REFUSALS.search(message) is not None and not _has_own(_FAULTS, message, quoted)


def is_constraint_refusal(message: str, quoted: str = "") -> bool:
    """Whether it is the request's constraint that is at fault."""
    guided = _GUIDED.match(message)
    return guided is not None and not _has_own(_FAULTS, guided["rest"], quoted)


def is_fatal(message: str, quoted: str = "") -> bool:
    """Whether the engine is lost, whatever it goes on to answer."""
    return _has_own(_FATAL, message, quoted)


def _has_own(words: re.Pattern[str], message: str, quoted: str) -> bool:
    """Whether the engine itself used one of `words`: none that the request has counts."""
    quoted = quoted.lower()
    return any(found[0].lower() not in quoted for found in words.finditer(message))
