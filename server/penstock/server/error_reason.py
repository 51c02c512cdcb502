"""The error reasons of the API, used by the fronts (gRPC server processes), the metrics and the
operations service.

Imports no other module of Penstock.
"""

import enum


class ErrorReason(enum.StrEnum):
    """The names of `penstock.v1.ErrorReason` without the prefix of the protobuf enum."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    EXCEEDS_KV_CACHE = "EXCEEDS_KV_CACHE"
    MALFORMED_REQUEST = "MALFORMED_REQUEST"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    ADAPTER_NOT_FOUND = "ADAPTER_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    QUEUE_FULL = "QUEUE_FULL"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    READER_STALLED = "READER_STALLED"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    DRAINING = "DRAINING"
    ENGINE_DOWN = "ENGINE_DOWN"
    FEATURE_UNSUPPORTED = "FEATURE_UNSUPPORTED"
    EXECUTOR_REQUEST_FAILED = "EXECUTOR_REQUEST_FAILED"
    INTERNAL = "INTERNAL"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    SEQUENCE_UNAVAILABLE = "SEQUENCE_UNAVAILABLE"
    MODEL_NOT_READY = "MODEL_NOT_READY"
    MODEL_EXISTS = "MODEL_EXISTS"
    STREAM_SUPERSEDED = "STREAM_SUPERSEDED"
    EXECUTOR_REJECTED = "EXECUTOR_REJECTED"
    NOT_POSSIBLE_NOW = "NOT_POSSIBLE_NOW"


REJECTIONS = frozenset(
    {
        ErrorReason.INVALID_ARGUMENT,
        ErrorReason.PROMPT_TOO_LONG,
        ErrorReason.EXCEEDS_KV_CACHE,
        ErrorReason.MALFORMED_REQUEST,
        ErrorReason.MODEL_NOT_FOUND,
        ErrorReason.ADAPTER_NOT_FOUND,
        ErrorReason.REQUEST_NOT_FOUND,
        ErrorReason.REQUEST_ID_IN_USE,
        ErrorReason.QUEUE_FULL,
        ErrorReason.QUOTA_EXCEEDED,
        ErrorReason.DEADLINE_UNREACHABLE,
        ErrorReason.DRAINING,
        ErrorReason.FEATURE_UNSUPPORTED,
        ErrorReason.UNAUTHENTICATED,
        ErrorReason.PERMISSION_DENIED,
        ErrorReason.SEQUENCE_UNAVAILABLE,
        ErrorReason.MODEL_NOT_READY,
        ErrorReason.MODEL_EXISTS,
        ErrorReason.EXECUTOR_REJECTED,
    }
)
"""A request that ends with one of these reasons is counted as rejected, not as failed."""
