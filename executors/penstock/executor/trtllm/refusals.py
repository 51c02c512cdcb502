"""What the engine's error texts mean: the request's own fault, or the end of the engine.

Owns the phrases. The engine has one exception for everything and differs in words only. To blame
the client wrongly hides a fault of ours, so only whole phrases that are known count, and none in a
text that names what a request cannot cause. A text may quote the client: words that decide against
the engine count only where the client's cannot stand.
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


def is_refusal(message: str) -> bool:
    """Whether the text says that the request is at fault."""
    if is_constraint_refusal(message):
        return True
    return _REFUSALS.search(message) is not None and _FAULTS.search(message) is None


def is_constraint_refusal(message: str) -> bool:
    """Whether it is the request's constraint that is at fault."""
    guided = _GUIDED.match(message)
    # What the compiler quotes stands behind its own words: a fault of the engine begins the text.
    return guided is not None and _FAULTS.match(guided["rest"]) is None


def is_fatal(message: str) -> bool:
    """Whether the engine is lost, whatever it goes on to answer."""
    # A refusal may quote the client, and with it any word.
    return not is_refusal(message) and _FATAL.search(message) is not None
