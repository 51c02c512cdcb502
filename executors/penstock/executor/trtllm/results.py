"""Converts responses to a `StepResult`.

All responses of one request are merged into one row. If the engine ends a request because of a stop
token or its length, this is reported, although the scheduler also detects it from the tokens (its
own check takes precedence). Any other end is a failure.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.executor.trtllm.api import Logprob
from penstock.executor.trtllm.response_queue import Response
from penstock.scheduler.batch import SlotEnd, SlotFailure, StepResult, TokenLogprobs
from penstock.scheduler.request import FinishReason

logger = logging.getLogger(__name__)

_MAX_WORDS_CHARS = 500
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def result_of(updates: Iterable[Response]) -> StepResult:
    """Return the step result for these responses. Responses to requests that the scheduler has
    released are left out.
    """
    rows: dict[int, list[Response]] = {}
    failures: list[SlotFailure] = []
    ends: list[SlotEnd] = []
    num_cached: list[tuple[int, int]] = []
    for response in updates:
        slot = response.submitted.slot
        if slot < 0:
            continue
        failure = (
            _failure_of(response)
            if response.is_last or response.submitted.num_logprobs >= 0
            else None
        )
        if failure is not None:
            failures.append(failure)
            continue
        if response.num_cached >= 0:
            num_cached.append((slot, response.num_cached))
        if response.tokens:
            rows.setdefault(slot, []).append(response)
        if response.is_last:
            reason = _FINISH_REASONS[response.finish_reason]
            ends.append(SlotEnd(slot=slot, reason=reason, stop_id=response.stop_id))
    for failure in failures:
        rows.pop(failure.slot, None)
    tokens: list[int] = []
    counts: list[int] = []
    for parts in rows.values():
        start = len(tokens)
        for part in parts:
            tokens += part.tokens
        counts.append(len(tokens) - start)
    return StepResult(
        slots=np.fromiter(rows, dtype=np.int32, count=len(rows)),
        tokens=np.array(tokens, dtype=np.int32),
        counts=np.array(counts, dtype=np.int32),
        logprobs=_logprobs_of(rows.values(), tokens),
        failures=tuple(failures),
        ends=tuple(ends),
        num_cached=tuple(num_cached),
    )


def _failure_of(response: Response) -> SlotFailure | None:
    detail = response.failure
    if detail and not response.is_synthetic:
        # The engine's text may quote the client's text, which is logged only if the settings allow
        # it.
        logger.debug(
            "the engine's error text of a request",
            extra={
                "request_id": response.submitted.spec.request_id,
                "trace_id": response.submitted.spec.trace_id.hex(),
                "exception_message": detail[:_MAX_WORDS_CHARS],
            },
        )
        detail = "the engine rejected it" if response.is_rejected else "the engine failed it"
    if response.is_last and not detail and response.finish_reason not in _FINISH_REASONS:
        detail = f"the engine ended it: {response.finish_reason or 'no reason'}"
    if not detail and response.submitted.num_logprobs >= 0:
        detail = _logprob_fault(response)
    if not detail:
        return None
    return SlotFailure(
        slot=response.submitted.slot,
        detail=detail,
        is_rejected=response.is_rejected,
        is_constraint_error=response.is_constraint_error,
    )


def _logprob_fault(response: Response) -> str:
    """Return what is wrong with the log probabilities of a response that must have them, or an
    empty string.
    """
    logprobs = response.logprobs
    if logprobs is None or len(logprobs) != len(response.tokens):
        if not response.tokens:
            return ""
        count = 0 if logprobs is None else len(logprobs)
        return f"the engine returned {count} log probabilities for {len(response.tokens)} tokens"
    for token, entry in zip(response.tokens, logprobs, strict=True):
        if token not in entry:
            return "the engine returned no log probability for a chosen token"
        if not _rank(entry, token):
            return "the engine returned a log probability without a rank"
    return ""


def _logprobs_of(rows: Iterable[Sequence[Response]], tokens: Sequence[int]) -> TokenLogprobs | None:
    """Return log probabilities aligned with `tokens`; entries that a request did not ask for are 0,
    their top ids -1. None if no request asks for log probabilities.
    """
    parts = [part for row in rows for part in row]
    widths = [part.submitted.num_logprobs for part in parts]
    width = max(widths, default=-1)
    if width < 0:
        return None
    chosen: NDArray[np.float32] = np.zeros(len(tokens), dtype=np.float32)
    ranks: NDArray[np.int32] = np.zeros(len(tokens), dtype=np.int32)
    top_ids: NDArray[np.int32] = np.full((len(tokens), width), -1, dtype=np.int32)
    top: NDArray[np.float32] = np.zeros((len(tokens), width), dtype=np.float32)
    at = 0
    for part, asked in zip(parts, widths, strict=True):
        entries = part.logprobs if asked >= 0 else None
        for offset, entry in enumerate(entries or ()):
            token = tokens[at + offset]
            chosen[at + offset], ranks[at + offset] = entry[token].logprob, _rank(entry, token)
            if asked:
                best = sorted(entry.items(), key=lambda item: -item[1].logprob)[:asked]
                top_ids[at + offset, : len(best)] = [token for token, _ in best]
                top[at + offset, : len(best)] = [found.logprob for _, found in best]
        at += len(part.tokens)
    return TokenLogprobs(chosen=chosen, ranks=ranks, top_ids=top_ids, top_logprobs=top)


def _rank(entry: Mapping[int, Logprob], token: int) -> int:
    """Return the rank of a chosen token, from 1: the engine's, else computed from the other tokens
    in `entry`; 0 if unknown.
    """
    found = entry[token]
    if found.rank is not None:
        return found.rank
    num_better = sum(other.logprob > found.logprob for other in entry.values())
    # The last of several entries may have been added only because it was chosen.
    return 1 + num_better if num_better < max(1, len(entry) - 1) else 0
