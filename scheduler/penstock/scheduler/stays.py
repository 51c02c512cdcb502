"""Statistics of each residency in the running batch: number of steps and batch sizes.

Owns the account of every occupied slot, and the sizes of recent steps. Does not know which request
is in a slot nor why it is released. Events of one request are recorded; a step costs the same
however many run.
"""

from bisect import bisect_right
from collections.abc import Sequence

from penstock.scheduler.events import Stay
from penstock.scheduler.flight import Chunk

_NOT_DECODING = -1


class _LeastSince:
    """The minimum of a series of values from any step on until now.

    Keeps the steps from which on that minimum changes: one entry for each different value at most,
    both columns ascending. Queries use bisection.
    """

    __slots__ = ("_starts", "_values")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: list[int] = []

    def note(self, step: int, value: int) -> None:
        """The value from `step` on."""
        starts, values = self._starts, self._values
        while values and values[-1] >= value:
            step = starts.pop()
            values.pop()
        starts.append(step)
        values.append(value)

    def since(self, step: int) -> int:
        """The minimum from `step` on; there must have been a value by then."""
        return self._values[bisect_right(self._starts, step) - 1]


class _Account:
    """One slot's: rows of prefill, those of them that repeat a sample, and steps that decoded.

    `is_again`: the next one repeats.
    """

    __slots__ = (
        "decoding_since",
        "first_step",
        "is_again",
        "num_decodes",
        "num_prefills",
        "num_repeats",
        "sizes",
    )

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self.num_prefills = 0
        self.num_repeats = 0
        self.is_again = False
        self.num_decodes = 0
        self.decoding_since = _NOT_DECODING
        # Minimum and maximum, once it has had its last step.
        self.sizes: tuple[int, int] | None = None


class Stays:
    """The accounts of all slots. Steps are counted from 0, `num_steps` is the next one's."""

    def __init__(self, num_slots: int) -> None:
        self._accounts = [_Account(0) for _ in range(num_slots)]
        self._size = 0
        self._least = _LeastSince()
        self._greatest = _LeastSince()
        self.num_steps = 0

    def note_step(self, size: int, chunks: Sequence[Chunk]) -> None:
        """A step of that many rows is planned, `chunks` of them prefill."""
        # A step without rows has no residents.
        if size and size != self._size:
            self._size = size
            self._least.note(self.num_steps, size)
            self._greatest.note(self.num_steps, -size)
        self.num_steps += 1
        for chunk in chunks:
            account = self._accounts[chunk.slot]
            account.num_prefills += 1
            if account.is_again:
                account.num_repeats += 1
                account.is_again = False

    def begin(self, slot: int) -> None:
        """A request enters a slot, and has tokens in the next step."""
        self._accounts[slot] = _Account(self.num_steps)

    def start_decoding(self, slot: int) -> None:
        """From the next step on it has one token in each."""
        self._accounts[slot].decoding_since = self.num_steps

    def prefill_again(self, slot: int) -> None:
        """The last step sampled nothing for it; its row is planned again, as prefill."""
        account = self._accounts[slot]
        account.is_again = True
        self._stop_decoding(account)

    def pause_decoding(self, slot: int) -> None:
        """It has no token in the next step, and decodes again later."""
        self._stop_decoding(self._accounts[slot])

    def stop_decoding(self, slot: int) -> None:
        """Its last step is launched."""
        account = self._accounts[slot]
        self._stop_decoding(account)
        account.sizes = self._sizes_since(account.first_step)

    def end(self, slot: int) -> Stay:
        """The slot is released; returns the residency's statistics."""
        account = self._accounts[slot]
        self._stop_decoding(account)
        num_steps = account.num_prefills + account.num_decodes
        if not num_steps:
            return Stay()
        least, greatest = account.sizes or self._sizes_since(account.first_step)
        return Stay(account.num_prefills - account.num_repeats, num_steps, least, greatest)

    def _stop_decoding(self, account: _Account) -> None:
        if account.decoding_since != _NOT_DECODING:
            account.num_decodes += self.num_steps - account.decoding_since
            account.decoding_since = _NOT_DECODING

    def _sizes_since(self, step: int) -> tuple[int, int]:
        return self._least.since(step), -self._greatest.since(step)
