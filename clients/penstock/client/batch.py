"""The types of a batch of generations, and the collection of events into complete generations.

Shared by the asyncio and the blocking client. Does no I/O.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from penstock.client.decoding import join_outputs
from penstock.client.errors import PenstockError, StreamBroken
from penstock.client.events import (
    Accepted,
    EchoedPrompt,
    Event,
    Finished,
    Generation,
    PromptEcho,
    Tokens,
)
from penstock.client.options import GenerationRequest
from penstock.client.prompt import PromptLike

BatchRequest: TypeAlias = PromptLike | GenerationRequest
"""One request of a batch: a prompt, or a request with its options."""

BatchItem: TypeAlias = tuple[int, Event | PenstockError]
"""Index of the request in the batch, from 0, and its next event, or the error with which it
failed."""

OnEvent: TypeAlias = Callable[[int, Event], None]

DEFAULT_MAX_CONCURRENCY = 16
"""Number of requests that a batch opens concurrently by default."""

MAX_HELD_ITEMS = 2
"""Maximum number of items that were read from streams and not yet returned to the caller, per
concurrent request."""


class BatchFailed:
    """The last item of a batch that ends with an error, e.g. because a request is invalid or the
    source of requests has failed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class GenerationBuilder:
    """Collects the events of one stream into a `Generation`.

    A second `Accepted` means that the call was retried. The events before it are discarded.
    """

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._echoes: list[PromptEcho] = []
        self._pieces: list[Tokens] = []
        self._finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Add the next event."""
        if isinstance(event, Tokens):
            self._pieces.append(event)
        elif isinstance(event, Accepted):
            self._accepted = event
            self._echoes.clear()
            self._pieces.clear()
        elif isinstance(event, PromptEcho):
            self._echoes.append(event)
        elif isinstance(event, Finished):
            self._finished = event

    def result(self) -> Generation:
        """Return the complete generation. Raises `StreamBroken` without an `Accepted` or a
        `Finished` event."""
        if self._accepted is None or self._finished is None:
            raise StreamBroken.with_message("the stream has not ended")
        return Generation(
            accepted=self._accepted,
            prompt=_joined(self._echoes),
            outputs=join_outputs(self._pieces, self._finished),
            finished=self._finished,
        )


class BatchResults:
    """The results of a batch, in order: a Generation or an error for each request."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event
        self._builders: dict[int, GenerationBuilder] = {}
        self._results: dict[int, Generation | PenstockError] = {}

    def add(self, item: BatchItem) -> None:
        """Add the next item of the batch. If it is an event, call `on_event` with the index and the
        event."""
        index, event = item
        if isinstance(event, PenstockError):
            self._builders.pop(index, None)
            self._results[index] = event
            return
        builder = self._builders.setdefault(index, GenerationBuilder())
        builder.add(event)
        if isinstance(event, Finished):
            self._results[index] = builder.result()
            del self._builders[index]
        if self._on_event is not None:
            self._on_event(index, event)

    def in_order(self) -> list[Generation | PenstockError]:
        """Return the results of all requests that have ended, in the order of the requests."""
        results: Mapping[int, Generation | PenstockError] = self._results
        return [results[index] for index in sorted(results)]


def require_requests(requests: object) -> None:
    """Raise TypeError if `requests` is a single str or GenerationRequest instead of a collection. A
    str would be read as one prompt per character."""
    if isinstance(requests, str | GenerationRequest):
        raise TypeError("requests: must be several, not one")


@contextmanager
def errors_at(index: int) -> Generator[None, None, None]:
    """Prefix the message of a ValueError or TypeError, raised in the `with` block, with the index
    of the request in the batch."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"requests[{index}]: {error}") from None
    except ValueError as error:
        raise ValueError(f"requests[{index}]: {error}") from None


def batch_width(max_concurrency: int, max_concurrent_calls: int | None) -> int:
    """Return the number of requests that a batch opens concurrently: `max_concurrency`, or the
    limit of the pool if that is lower.

    Raises ValueError if `max_concurrency` is below 1.
    """
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency: must be at least 1, not {max_concurrency}")
    if max_concurrent_calls is None:
        return max_concurrency
    return min(max_concurrency, max_concurrent_calls)


def _joined(echoes: Iterable[PromptEcho]) -> EchoedPrompt | None:
    pieces = tuple(echoes)
    if not pieces:
        return None
    return EchoedPrompt(
        text="".join(piece.text for piece in pieces),
        records=tuple(record for piece in pieces for record in piece.records),
    )
