"""CacheOptions: which requests share cached blocks, and how long blocks are kept."""

import math
from typing import Final

from penstock.scheduler.executor import Feature
from penstock.scheduler.request import CacheRetention
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.tenants import MAX_PRIORITY
from penstock.v1.options_pb2 import CacheOptions

MAX_SALT_CHARS: Final = 128
MAX_SESSION_CHARS: Final = 128
_RETENTION = "cache.retention"
_SESSION = "cache.session_id"


def read_salt(options: CacheOptions, violations: Violations) -> str:
    """The client's salt, empty for none."""
    if not options.HasField("salt"):
        return ""
    violations.text_length("cache.salt", options.salt, 1, MAX_SALT_CHARS)
    return options.salt


def read_session(options: CacheOptions, limits: Limits, violations: Violations) -> str:
    """The session that the request continues, empty for none."""
    if not options.HasField("session_id"):
        return ""
    violations.require_feature("sessions", _SESSION, is_supported=limits.has_sessions)
    violations.text_length(_SESSION, options.session_id, 1, MAX_SESSION_CHARS)
    return options.session_id


def check_leaves_blocks(
    options: CacheOptions, num_prompt_logprobs: int, violations: Violations
) -> None:
    """Record the options that conflict with a request whose blocks are not cached."""
    if num_prompt_logprobs < 0:
        return
    for path, is_set in (
        (_SESSION, options.HasField("session_id")),
        (_RETENTION, options.HasField("retention")),
    ):
        if is_set:
            violations.add(path, "cannot be combined with output.prompt_logprobs")


def read_retention(
    options: CacheOptions, max_priority: int, limits: Limits, violations: Violations
) -> CacheRetention | None:
    """How long the request's blocks are kept; None for the executor's default.

    A priority above `max_priority` is lowered to it.
    """
    if not options.HasField("retention"):
        return None
    feature = Feature.CACHE_RETENTION
    violations.require_feature(feature.value, _RETENTION, is_supported=feature in limits.features)
    wanted, default = options.retention, CacheRetention()
    return CacheRetention(
        priority=(
            min(
                violations.integer(f"{_RETENTION}.level", wanted.level, 0, MAX_PRIORITY),
                max_priority,
            )
            if wanted.HasField("level")
            else default.priority
        ),
        duration_s=(
            violations.duration_s(f"{_RETENTION}.duration", wanted.duration)
            if wanted.HasField("duration")
            else math.inf
        ),
    )
