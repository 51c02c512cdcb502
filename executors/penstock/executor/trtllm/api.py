"""The part of TensorRT-LLM's Python API that is used here, as protocols.

Owns the one description of foreign objects: everything else in this folder is typed by it, so that
a name which is not here cannot be used, and a test holds every name here against a record of the
real package. Line 1.2, PyTorch backend. Does not import the package.
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
        """1 and up; None where it is not told."""
        ...


class CompletionOutput(Protocol):
    """One sequence of a request. Everything is cumulative, and the object changes under the reader.

    `finish_reason`: None while it runs, then "stop", "length", "timeout" or "cancelled".
    `stop_reason`: the stop token id that ended it, None for the end-of-sequence token.
    """

    index: int
    token_ids: list[int]
    logprobs: Sequence[Mapping[int, Logprob]] | Sequence[float] | None
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """A submitted request: the same object every time it is iterated."""

    request_id: int
    outputs: Sequence[CompletionOutput]
    finished: bool
    cached_tokens: int

    def abort(self) -> None:
        """Ask for the end; returns at once, and a request that still waits never answers."""
        ...

    def __aiter__(self) -> AsyncIterator["RequestOutput"]: ...


class Llm(Protocol):
    """`tensorrt_llm.LLM`, built. Everything belongs to one event loop but what blocks: `shutdown`,
    and `get_stats` of versions that fetch statistics by RPC.
    """

    # Optional arguments differ between versions: they go by keyword, after a look at the signature.
    generate_async: Callable[..., RequestOutput]

    mpi_session: Any
    """What started the engine's processes; None where there are none."""

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Statistics of single iterations since the last call; waits for one, blocking."""
        ...

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Statistics of single iterations; ends after `timeout` seconds without any."""
        ...

    def shutdown(self) -> None:
        """Give everything back; blocks."""
        ...

    def _check_health(self) -> bool: ...


class SamplingParams(Protocol):
    """`tensorrt_llm.SamplingParams`: changed by whoever it is handed to, so never used twice."""


class GuidedDecodingParams(Protocol):
    """`tensorrt_llm.llmapi.GuidedDecodingParams`."""


class LoRARequest(Protocol):
    """`tensorrt_llm.llmapi.LoRARequest`."""


class KvCacheRetentionConfig(Protocol):
    """`tensorrt_llm.llmapi.KvCacheRetentionConfig`."""
