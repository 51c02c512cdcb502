"""The messages of one stream as they were sent, for whoever asks for them again.

Owns their bytes, their numbers and how the stream ended. Bounded by whoever adds: the oldest go
first. They hold output text: nothing here is ever logged or shown to operators. Does not know what
a message says.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from penstock.server.front.errors import Refusal

MESSAGE_OVERHEAD_BYTES: Final = 48
"""What a message takes besides its bytes, about: the object around them, and its place here."""


class MessageLog:
    """Messages `first_sequence` to `next_sequence` - 1 of a stream.

    `began_at`: the first there ever was here; those before it died with the front that told them.
    `num_bytes`: what they take in memory, about. `is_ended`: there will be no more; `refusal`: what
    the stream ended with, None for well.
    """

    __slots__ = ("_messages", "began_at", "first_sequence", "is_ended", "num_bytes", "refusal")

    def __init__(self, first_sequence: int = 0, began_at: int | None = None) -> None:
        self._messages: deque[bytes] = deque()
        self.began_at = first_sequence if began_at is None else began_at
        self.first_sequence = first_sequence
        self.num_bytes = 0
        self.is_ended = False
        self.refusal: Refusal | None = None

    @property
    def next_sequence(self) -> int:
        """The number of the next message that is added."""
        return self.first_sequence + len(self._messages)

    def add(self, message: bytes) -> None:
        """The next message."""
        self._messages.append(message)
        self.num_bytes += len(message) + MESSAGE_OVERHEAD_BYTES

    def extend(self, messages: Iterable[bytes]) -> None:
        """The next messages."""
        for message in messages:
            self.add(message)

    def end(self, refusal: Refusal | None) -> None:
        """There will be no more. Only the first end counts."""
        if not self.is_ended:
            self.is_ended = True
            self.refusal = refusal

    def has(self, sequence: int) -> bool:
        """Whether a stream can go on with this message: it is here, or will be the next."""
        return self.first_sequence <= sequence <= self.next_sequence

    def get(self, sequence: int) -> bytes:
        """The message of this number; it must be here."""
        return self._messages[sequence - self.first_sequence]

    def since(self, sequence: int) -> tuple[bytes, ...]:
        """All messages from this number on."""
        start = max(0, sequence - self.first_sequence)
        return tuple(self._messages)[start:]

    def trim(self, max_bytes: int) -> int:
        """Forget the oldest until no more than `max_bytes` are left; how many bytes that gave."""
        before = self.num_bytes
        while self._messages and self.num_bytes > max_bytes:
            self.num_bytes -= len(self._messages.popleft()) + MESSAGE_OVERHEAD_BYTES
            self.first_sequence += 1
        return before - self.num_bytes
