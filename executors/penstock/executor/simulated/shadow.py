"""A shadow of the paged KV cache: detects paging bugs of the scheduler.

Each key-value entry is a hash of the salt and of all tokens up to its position. Paging bugs (a
block freed too early, shared while writable, reused for other content or under another salt, a
changed block table) raise DeviceCheckError in the step that would read wrong values.
"""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.executor.splitmix import mix64
from penstock.scheduler.batch import Batch
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import Request
from penstock.scheduler.slot_arrays import SlotArrays


class DeviceCheckError(AssertionError):
    """A real device would compute the batch wrongly: the scheduler has a bug."""


class ShadowMemory:
    """The entries written into each block, and the tokens of each slot. Methods raise
    DeviceCheckError for an invalid slot, row or block.

    `_written` uint64 [num_blocks, block_size]: the entry at each offset of each block, 0 if none
    was written. Per slot: `_tokens` has its token ids, `_num_tokens` their number, and `_prefixes`
    uint64 the expected entry at each position.
    """

    def __init__(self, info: ExecutorInfo) -> None:
        self._info = info
        self._written = np.zeros((info.num_blocks, info.block_size), dtype=np.uint64)
        shape = (info.max_num_seqs, info.max_seq_len)
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._prefixes = np.zeros(shape, dtype=np.uint64)
        self._num_tokens = np.zeros(info.max_num_seqs, dtype=np.int32)
        self._is_live = np.zeros(info.max_num_seqs, dtype=np.bool_)
        self._roots = np.zeros(info.max_num_seqs, dtype=np.uint64)

    def num_tokens(self, slot: int) -> int:
        """Return the number of the slot's tokens that the device has, including sampled tokens."""
        return int(self._num_tokens[slot])

    def release(self, slot: int) -> None:
        """Clear the record of a slot; its blocks keep their content."""
        _require(bool(self._is_live[slot]), f"slot {slot} is released but was not assigned")
        self._is_live[slot] = False
        self._num_tokens[slot] = 0

    def admit(self, request: Request, arrays: SlotArrays) -> None:
        """Copy a new slot's tokens from `arrays`; they must start with the request's prompt."""
        slot, spec = request.slot, request.spec
        _require(0 <= slot < self._info.max_num_seqs, f"slot {slot} is out of range")
        _require(not self._is_live[slot], f"slot {slot} is assigned twice")
        _require(int(arrays.key[slot]) == spec.key, f"slot {slot}: key differs from its request")
        self._is_live[slot] = True
        root = blake2b(spec.hash_salt, digest_size=8).digest()
        self._roots[slot] = int.from_bytes(root, "little")
        count = int(arrays.num_tokens[slot])
        tokens = arrays.token_ids[slot, :count]
        _require(
            count >= spec.num_prompt_tokens
            and np.array_equal(tokens[: spec.num_prompt_tokens], spec.prompt_ids),
            f"slot {slot}: its tokens do not start with the prompt of its request",
        )
        self.append(slot, tokens)

    def append(self, slot: int, tokens: NDArray[np.int32]) -> None:
        """Add `tokens` [n] to a slot, and compute their expected entries."""
        first, end = int(self._num_tokens[slot]), int(self._num_tokens[slot]) + len(tokens)
        self._tokens[slot, first:end] = tokens
        positions = np.arange(first, end, dtype=np.uint64)
        entries = mix64((tokens.astype(np.uint64) << np.uint64(32)) + positions + np.uint64(1))
        before = self._prefixes[slot, first - 1] if first else self._roots[slot]
        # A wrapping sum of hashed (token, position) pairs, which identifies the prefix.
        self._prefixes[slot, first:end] = before + np.cumsum(entries, dtype=np.uint64)
        self._num_tokens[slot] = end

    def check(self, batch: Batch) -> None:
        """Raise DeviceCheckError unless the batch is well-formed and every row reads only entries
        that were written for its prefix.
        """
        slots = batch.slots
        _require(len(np.unique(slots)) == len(slots), "a slot has two rows")
        _require(
            len(batch.num_tokens) == len(batch.starts) == len(slots) >= batch.num_decodes,
            "rows and columns of the batch differ in length",
        )
        _require(bool((batch.num_tokens >= 1).all()), "a row has no tokens")
        _require(
            bool((batch.num_tokens[: batch.num_decodes] == 1).all()),
            "a decode row has more than one token",
        )
        for slot, start, count in zip(
            slots.tolist(), batch.starts.tolist(), batch.num_tokens.tolist(), strict=True
        ):
            self._check_row(batch.arrays, slot, start, start + count)
        is_end = batch.starts + batch.num_tokens >= self._num_tokens[slots]
        _require(
            np.array_equal(slots[is_end], batch.sampled_slots),
            f"sampled_slots {batch.sampled_slots.tolist()} are not the rows that end what is "
            f"known, {slots[is_end].tolist()}",
        )

    def _check_row(self, arrays: SlotArrays, slot: int, start: int, end: int) -> None:
        info = self._info
        _require(0 <= slot < info.max_num_seqs and bool(self._is_live[slot]), f"{slot} has no slot")
        # A row may start one position past the known tokens: one that was launched before the
        # request's failure in the previous step was reported.
        _require(
            0 <= start < end <= min(info.max_seq_len, self.num_tokens(slot) + 1),
            f"slot {slot}: positions {start}..{end - 1} with {self.num_tokens(slot)} known tokens",
        )
        count = int(arrays.num_tokens[slot])
        _require(
            count <= self.num_tokens(slot)
            and np.array_equal(arrays.token_ids[slot, :count], self._tokens[slot, :count]),
            f"slot {slot}: its tokens differ from those on the device",
        )
        num_blocks = -(-end // info.block_size)
        _require(int(arrays.num_blocks[slot]) >= num_blocks, f"slot {slot}: blocks end too early")
        blocks = arrays.block_table[slot, :num_blocks]
        _require(
            bool(((blocks >= 0) & (blocks < info.num_blocks)).all()),
            f"slot {slot}: block out of range in {blocks.tolist()}",
        )
        _require(len(np.unique(blocks)) == num_blocks, f"slot {slot}: a block occurs twice")
        found = self._written[blocks].reshape(-1)[:start]
        wrong = np.flatnonzero(found != self._prefixes[slot, :start])
        if len(wrong):
            position = int(wrong[0])
            block = int(blocks[position // info.block_size])
            what = "nothing was written" if found[position] == 0 else "another prefix was written"
            raise DeviceCheckError(
                f"slot {slot} reads position {position} in block {block}: {what} there "
                f"({len(wrong)} of {start} positions are wrong)"
            )

    def write(
        self,
        arrays: SlotArrays,
        slots: NDArray[np.int32],
        starts: NDArray[np.integer[Any]],
        counts: NDArray[np.int32],
    ) -> None:
        """Write `counts` [m] entries from `starts` [m] on, for m slots, at most up to each slot's
        last token.

        Raises DeviceCheckError when two entries go to the same place.
        """
        written: set[int] = set()
        size = self._info.block_size
        for slot, start, count in zip(
            slots.tolist(), starts.tolist(), counts.tolist(), strict=True
        ):
            end = min(start + count, self.num_tokens(slot))
            positions = np.arange(start, end, dtype=np.int64)
            blocks = arrays.block_table[slot, positions // size]
            offsets = positions % size
            places: set[int] = set((blocks * size + offsets).tolist())
            _require(
                not written & places,
                f"slot {slot} writes to the same place as another row",
            )
            written |= places
            self._written[blocks, offsets] = self._prefixes[slot, start:end]


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise DeviceCheckError(message)
