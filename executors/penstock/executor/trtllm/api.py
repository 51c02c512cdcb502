"""Protocols for the part of TensorRT-LLM's Python API that this package uses.

All other modules are typed with these protocols, so type checks reject names that are not listed
here. The names are taken from release 1.2, PyTorch backend; a test compares them with the recorded
API (`facts/`). Does not import TensorRT-LLM.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol


class Logprob(Protocol):
    """One entry of `CompletionOutput.logprobs`. `rank` 1 is the most likely."""

    @property
    def logprob(self) -> float:
        """The natural logarithm of the probability."""
        ...

    @property
    def rank(self) -> int | None:
        """The rank of the token, from 1; None if the engine does not report it."""
        ...


class CompletionOutput(Protocol):
    """One output sequence of a request. `token_ids` and `logprobs` contain the whole output so far;
    the engine extends them in place.

    `finish_reason`: None while the sequence runs, then "stop", "length", "timeout" or "cancelled".
    `stop_reason`: the stop token id or stop string that ended it; None if it ended otherwise, for
    example at the `end_id` of the sampling parameters.
    """

    index: int
    token_ids: list[int]
    logprobs: Sequence[Mapping[int, Logprob]] | Sequence[float] | None
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """A submitted request. Iterating over it yields the same object after each update."""

    request_id: int
    outputs: Sequence[CompletionOutput]
    finished: bool
    cached_tokens: int

    def abort(self) -> None:
        """Abort the request and return immediately. A request that is still in the engine's queue
        gets no final result.
        """
        ...

    def __aiter__(self) -> AsyncIterator["RequestOutput"]: ...


class Llm(Protocol):
    """`tensorrt_llm.LLM`. Use it on one event loop, except for the blocking calls `shutdown` and,
    in versions that fetch statistics by RPC, `get_stats`.
    """

    # Optional arguments differ between versions: they are passed by keyword if the signature has
    # them.
    generate_async: Callable[..., RequestOutput]

    mpi_session: Any
    """The MPI session of the engine's processes, or None."""

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the statistics of every engine iteration since the last call; wait up to `timeout`
        seconds for the first.
        """
        ...

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Iterate over the statistics of engine iterations; end after `timeout` seconds without
        one.
        """
        ...

    def shutdown(self) -> None:
        """Stop the engine and release its resources; blocks. Raises the cause again if the engine
        has died.
        """
        ...

    def _check_health(self) -> bool: ...


class SamplingParams(Protocol):
    """Protocol of `tensorrt_llm.SamplingParams`: the sampling options of one request.

    The engine modifies the object, so it is never reused.
    """


class GuidedDecodingParams(Protocol):
    """Protocol of `tensorrt_llm.llmapi.GuidedDecodingParams`: the structured-output constraint of
    one request.
    """


class LoRARequest(Protocol):
    """Protocol of `tensorrt_llm.llmapi.LoRARequest`: the LoRA adapter of one request."""


class KvCacheRetentionConfig(Protocol):
    """Protocol of `tensorrt_llm.llmapi.KvCacheRetentionConfig`: for how long, and with which
    priority, the KV cache keeps a request's blocks.
    """
