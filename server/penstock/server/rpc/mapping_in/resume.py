"""Whether a request outlives its call: `GenerateRequest.resume_timeout`.

Owns the reading of that field, and the serialised request that is kept.
"""

from typing import Final

from penstock.server.front.errors import refuse_field
from penstock.server.front.generation import Resumption
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.v1.generation_service_pb2 import GenerateRequest

_FEATURE: Final = "resume"
_PATH: Final = "resume_timeout"


def read_resumption(
    request: GenerateRequest, limits: Limits, violations: Violations
) -> Resumption | None:
    """How long the request is kept for Resume, and its bytes; None when it is not resumable."""
    if not request.HasField("resume_timeout"):
        return None
    max_s = limits.config.max_resume_grace_s
    if not max_s:
        violations.require_feature(_FEATURE, _PATH, is_supported=False)
        return None
    grace_s = violations.duration_s(_PATH, request.resume_timeout, max_s)
    return Resumption(grace_s=grace_s, message=request.SerializeToString())


def check_not_resumable(request: GenerateRequest) -> None:
    """For a response in one message. Raises RequestError: there is no stream to resume."""
    if request.HasField("resume_timeout"):
        raise refuse_field(_PATH, "must not be set: the response is one message")
