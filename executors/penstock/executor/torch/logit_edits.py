"""Edits logits before sampling: applies penalties and logit bias, and bans stop ids.

The order is: penalties act on the model's logits, then the client's bias is added, then stop ids
are banned (their logits become minus infinity) while the output is shorter than `min_tokens`. All
rows that need an edit are edited together; the cost of penalties grows with the lengths of the
sequences, not with the vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.slot_rules import SlotRules
from penstock.scheduler.slot_arrays import SlotArrays

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Edits float32 logits in place, one row for each slot.

    `lengths` int64 [slots]: for each slot to sample, the number of tokens before the sampled one.
    The slot arrays may have fewer tokens, if the result of an earlier step has not been collected.
    """

    arrays: SlotArrays
    rules: SlotRules
    lengths: Ints

    def needed(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of `slots` [m] need an edit, bool [m]."""
        needed = self._is_penalised(slots) | self._is_below_min_tokens(slots)
        if self.rules.bias:
            needed |= np.isin(slots, list(self.rules.bias))
        return needed

    def apply(self, logits: Tensor, slots: Ints) -> None:
        """Edit `logits` [m, vocabulary], one row for each of `slots`."""
        penalised = np.flatnonzero(self._is_penalised(slots))
        if len(penalised):
            self._penalise(logits, slots, penalised)
        if self.rules.bias:
            self._add_bias(logits, slots)
        banned = np.flatnonzero(self._is_below_min_tokens(slots))
        if len(banned):
            self._ban_stops(logits, slots, banned)

    def _is_penalised(self, slots: Ints) -> NDArray[np.bool_]:
        arrays = self.arrays
        is_penalised: NDArray[np.bool_] = (
            (arrays.repetition_penalty[slots] != 1.0)
            | (arrays.presence_penalty[slots] != 0.0)
            | (arrays.frequency_penalty[slots] != 0.0)
        )
        return is_penalised

    def _is_below_min_tokens(self, slots: Ints) -> NDArray[np.bool_]:
        is_banned: NDArray[np.bool_] = self.lengths[slots] < self.arrays.min_total[slots]
        return is_banned

    def _penalise(self, logits: Tensor, slots: Ints, rows: Ints) -> None:
        arrays = self.arrays
        seen: list[NDArray[np.int32]] = []
        outputs: list[NDArray[np.int32]] = []
        for slot in slots[rows]:
            num_tokens, num_prompt = self.lengths[slot], arrays.num_prompt[slot]
            seen.append(arrays.token_ids[slot, :num_tokens])
            outputs.append(arrays.token_ids[slot, num_prompt:num_tokens])

        def places(tokens: list[NDArray[np.int32]]) -> tuple[Tensor, Tensor, Ints]:
            lengths = [len(part) for part in tokens]
            at = np.repeat(rows, lengths)
            ids = np.concatenate(tokens).astype(np.int64)
            device = logits.device
            return torch.from_numpy(at).to(device), torch.from_numpy(ids).to(device), at

        def spread(column: NDArray[np.float32], at: Ints) -> Tensor:
            return torch.from_numpy(column[slots[at]]).to(logits.device)

        at, ids, row = places(seen)
        penalty = spread(arrays.repetition_penalty, row)
        values = logits[at, ids]
        most = torch.finfo(logits.dtype).max  # avoid an infinite logit with a very small penalty
        changed = torch.where(values > 0, values / penalty, values * penalty).clamp_(-most, most)
        # A token that occurs several times is written several times with the same value.
        logits[at, ids] = changed
        at, ids, row = places(outputs)
        logits[at, ids] = logits[at, ids] - spread(arrays.presence_penalty, row)
        frequency = spread(arrays.frequency_penalty, row)
        logits.index_put_((at, ids), -frequency, accumulate=True)

    def _add_bias(self, logits: Tensor, slots: Ints) -> None:
        rows = [row for row, slot in enumerate(slots) if int(slot) in self.rules.bias]
        if not rows:
            return
        parts = [self.rules.bias[int(slots[row])] for row in rows]
        at = np.repeat(rows, [len(ids) for ids, _ in parts])
        ids = np.concatenate([ids for ids, _ in parts])
        values = np.concatenate([values for _, values in parts])
        device = logits.device
        logits.index_put_(
            (torch.from_numpy(at).to(device), torch.from_numpy(ids).to(device)),
            torch.from_numpy(values).to(device),
            accumulate=True,
        )

    def _ban_stops(self, logits: Tensor, slots: Ints, rows: Ints) -> None:
        stop_ids = self.arrays.stop_ids[:, slots[rows]].T.astype(np.int64)
        is_used = (stop_ids >= 0) & (stop_ids < logits.shape[1])
        at = np.broadcast_to(rows[:, None], stop_ids.shape)[is_used]
        device = logits.device
        ids = torch.from_numpy(stop_ids[is_used]).to(device)
        logits[torch.from_numpy(at).to(device), ids] = float("-inf")
