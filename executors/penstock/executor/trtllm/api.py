"""The part of TensorRT-LLM's Python API that this folder uses, as protocols.

All other modules of this folder are typed by these protocols, so that they cannot use a name that
is not here; a test compares every name with a record of the real package. Release 1.2, PyTorch
backend. Does not import the package.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol


class Logprob(Protocol):
    """One entry of `CompletionOutput.logprobs`. `rank` 1 is the most likely."""

    @property
    def logprob(self) -> float:
        """Natural logarithm."""
        ...

    @property
    def rank(self) -> int | None:
        """From 1; None if the engine does not report it."""
        ...


class CompletionOutput(Protocol):
    """One sequence of a request. Everything is cumulative, and the engine modifies the object while
    it is read.

    `finish_reason`: None while the sequence runs, then "stop", "length", "timeout" or "cancelled".
    `stop_reason`: the stop token id that ended it, None for the end-of-sequence token.
    """

    index: int
    token_ids: list[int]
    logprobs: Sequence[Mapping[int, Logprob]] | Sequence[float] | None
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """A submitted request: every iteration returns the same object."""

    request_id: int
    outputs: Sequence[CompletionOutput]
    finished: bool
    cached_tokens: int

    def abort(self) -> None:
        """Abort the request and return at once. A request that still waits gets no final result."""
        ...

    def __aiter__(self) -> AsyncIterator["RequestOutput"]: ...


class Llm(Protocol):
    """`tensorrt_llm.LLM`. Use it on one event loop, except for the blocking calls: `shutdown`, and
    `get_stats` of versions that fetch statistics by RPC.
    """

    # Optional arguments differ between versions: they are passed by keyword if the signature has
    # them.
    generate_async: Callable[..., RequestOutput]

    mpi_session: Any
    """The MPI session of the engine's processes, or None."""

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the statistics of each iteration since the last call; block until there is one."""
        ...

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Iterate over the statistics of iterations; end after `timeout` seconds without any."""
        ...

    def shutdown(self) -> None:
        """Release everything; blocks."""
        ...

    def _check_health(self) -> bool: ...


class SamplingParams(Protocol):
    """`tensorrt_llm.SamplingParams`. The engine modifies the object, so it is never reused."""


class GuidedDecodingParams(Protocol):
    """`tensorrt_llm.llmapi.GuidedDecodingParams`."""


class LoRARequest(Protocol):
    """`tensorrt_llm.llmapi.LoRARequest`."""


class KvCacheRetentionConfig(Protocol):
    """`tensorrt_llm.llmapi.KvCacheRetentionConfig`."""
