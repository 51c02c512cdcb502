"""The values of labels: closed vocabularies, so that no caller can make a new series.

Owns the words. Whatever is not among them is `other`, and what is absent as `none`: an
empty label would be no label to Prometheus.
"""

from collections.abc import Collection
from typing import Final

from penstock.scheduler.events import WaitReason
from penstock.scheduler.request import FinishReason
from penstock.server.error_reason import ErrorReason
from penstock.server.observe.status_codes import STATUS_NAMES

OTHER: Final = "other"
NONE: Final = "none"

METHODS: Final = frozenset(
    f"penstock.v1.{method}"
    for method in (
        "GenerationService/Generate",
        "GenerationService/GenerateOnce",
        "GenerationService/Multiplex",
        "GenerationService/Resume",
        "GenerationService/Cancel",
        "ModelService/ListModels",
        "ModelService/GetModel",
        "ModelService/Tokenize",
        "ModelService/Detokenize",
        "ModelService/LoadModel",
        "ModelService/UnloadModel",
        "ModelService/WatchModels",
        "ModelService/SetModelAlias",
        "ModelService/LoadAdapter",
        "ModelService/UnloadAdapter",
        "ModelService/ListAdapters",
    )
)
FOREIGN_METHODS: Final = frozenset(("vllm.grpc.engine.VllmEngine/Generate",))
"""Those of facades that bring requests."""
REASONS: Final = frozenset(reason.value for reason in ErrorReason)
FINISH_REASONS: Final = frozenset(reason.name for reason in FinishReason)
REJECTIONS: Final = frozenset(
    reason.value
    for reason in (
        ErrorReason.QUEUE_FULL,
        ErrorReason.QUOTA_EXCEEDED,
        ErrorReason.DEADLINE_UNREACHABLE,
        ErrorReason.DRAINING,
        ErrorReason.ENGINE_DOWN,
        ErrorReason.MODEL_NOT_READY,
        ErrorReason.EXCEEDS_KV_CACHE,
        ErrorReason.EXECUTOR_REFUSED,
    )
)
"""Reasons to turn a sound request away that lie in the state of the service, not in the request."""
ENGINE_LOST: Final = "engine_lost"
WAIT_REASONS: Final = (*(reason.name.lower() for reason in WaitReason), OTHER, ENGINE_LOST)
"""`other`: nothing was lacking, the next step had not been planned. `engine_lost`: the engine was
gone, and no other there yet."""
OUTCOMES: Final = ("ok", "cancelled", "error")
DROP_REASONS: Final = frozenset(("full", "no_observer", "no_room", "unreadable", OTHER))
"""What is there from the start; what else a front counts keeps its name, within bounds."""
MAX_DROP_REASONS: Final = 16
TRACE_DROPS: Final = ("queue_full", "export", "closing", "unwritable")
"""Why traces are lost; there from the start."""
TRACE_OUTCOMES: Final = ("kept", "sampled_out", "dropped")
SPAN_OUTCOMES: Final = ("exported", "dropped")


def known(word: str, words: Collection[str]) -> str:
    """`word` if it is one of `words`, `none` if there is none, else `other`."""
    if not word:
        return NONE
    return word if word in words else OTHER


def code_name(code: int) -> str:
    """The name of a gRPC status code."""
    return STATUS_NAMES[code] if 0 <= code < len(STATUS_NAMES) else OTHER


def outcome(code: int, finish_reason: str) -> str:
    """One of OUTCOMES: a request that its client gave up is no error of ours."""
    cancelled = FinishReason.CANCELLED.name
    if STATUS_NAMES.index(cancelled) == code or (code == 0 and finish_reason == cancelled):
        return "cancelled"
    return "ok" if code == 0 else "error"
