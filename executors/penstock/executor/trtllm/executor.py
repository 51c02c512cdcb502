"""The TensorRT-LLM executor: the engine batches requests and manages the KV cache blocks;
Penstock's scheduler decides which requests are in the engine. `launch` sends submissions and aborts
to the event loop's thread; `collect` never waits and returns the responses received so far. The
engine never gets more requests than it can run, so that the scheduler's priorities, deadlines and
fairness apply; the limits are read from the engine.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from penstock.executor.config import ExecutorConfig
from penstock.executor.trtllm.block_account import BlockAccount
from penstock.executor.trtllm.engine import EngineHandle
from penstock.executor.trtllm.limits import num_blocks_ahead
from penstock.executor.trtllm.page_audit import PageAudit
from penstock.executor.trtllm.response_queue import ResponseQueue
from penstock.executor.trtllm.results import result_of
from penstock.executor.trtllm.submitted_request import SubmittedRequest
from penstock.executor.trtllm.watchdog import Watchdog
from penstock.scheduler.batch import Batch, SlotFailure, StepResult
from penstock.scheduler.executor import ExecutorDied, ExecutorInfo
from penstock.scheduler.request import Request

logger = logging.getLogger(__name__)

_ACCOUNT_INTERVAL_S = 60.0
_FORGOTTEN = "no response for this request while others progressed"


class TrtllmExecutor:
    """An `Executor` with one TensorRT-LLM engine. Call its methods on one thread.

    The constructor raises ExecutorUnavailable when the package is missing, cannot be loaded or
    lacks a class; ValueError for settings that the installed version or the model folder does not
    support; ExecutorDied when the engine does not start or respond, or cannot use an adapter.
    `clock` returns monotonic seconds.
    """

    def __init__(self, config: ExecutorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._responses = ResponseQueue()
        self._engine = EngineHandle(config, self._responses)
        self.info: ExecutorInfo = self._engine.info
        self.audit = PageAudit()
        self.num_cache_misses = 0
        self.num_lost = 0
        self._logged_account = ""
        self._next_account_s = clock() + _ACCOUNT_INTERVAL_S
        self._blocks = BlockAccount(
            max_num_seqs=self.info.max_num_seqs, num_blocks=self.info.num_blocks
        )
        self._num_blocks_ahead = num_blocks_ahead(config.trtllm, self.info.block_size)
        self._submitted: dict[int, SubmittedRequest] = {}
        watch = config.trtllm.watch
        self._watchdog = Watchdog(
            timeout_s=watch.response_timeout_s,
            max_failures_in_row=watch.max_failures_in_row,
            now_s=clock(),
        )
        self._is_closed = False

    @property
    def ready_fd(self) -> int | None:
        """A descriptor that is readable when `collect` has responses to return or the engine has
        died.
        """
        return self._responses.ready_fd

    @property
    def num_unconfirmed_aborts(self) -> int:
        """Number of aborted requests whose final response did not arrive within
        `watch.abort_timeout_s`.
        """
        return self._engine.streams.num_unconfirmed_aborts

    def launch(self, batch: Batch) -> None:
        """Submit the admitted requests, and abort the released ones that the engine still has.

        An admitted request waits while aborted requests hold the slots or blocks that it needs.
        Raises ExecutorDied after `close`.
        """
        if self._is_closed:
            raise ExecutorDied("the executor is closed")
        aborts = [
            submitted
            for slot in batch.released
            if (submitted := self._release_slot(slot)) is not None
        ]
        num_unanswered_blocks = self._blocks.num_unanswered_blocks
        if batch.admitted:
            starts = dict(zip(batch.slots.tolist(), batch.starts.tolist(), strict=True))
            for request in batch.admitted:
                self._blocks.admit(self._occupy_slot(request, starts[request.slot]))
        self._send_to_engine(aborts)
        self._check_pages(batch, num_unanswered_blocks)

    def collect(self) -> StepResult:
        """Return the responses since the last call, without waiting.

        Raises ExecutorDied after `close`, or if the engine has ended, returns no response for
        longer than `watch.response_timeout_s`, or fails `watch.max_failures_in_row` requests in a
        row. If a single request gets no response, only that request fails.
        """
        updates = self._responses.take()
        now_s = self._clock()
        self._watchdog.on_responses(updates, now_s)
        lost = self._watchdog.check(now_s)
        for response in updates:
            self._blocks.on_response(response.submitted)
            if response.is_last:
                self._blocks.on_end(response.submitted)
            if response.num_cached >= 0:
                self.num_cache_misses += response.num_cached < response.submitted.num_cached
        # Requests that can be submitted now are submitted by the next launch, because the scheduler
        # may release some first.
        result = result_of(updates)
        self._log_account(now_s)
        if lost:
            self.num_lost += len(lost)
            forgotten = tuple(
                SlotFailure(slot=submitted.slot, detail=_FORGOTTEN) for submitted in lost
            )
            result = replace(result, failures=result.failures + forgotten)
        return result

    def account(self) -> str:
        """Return one line with the number of anomalies of each kind; empty if there were none.

        The line begins with the number of comparisons of the scheduler's and the engine's number of
        used blocks (`page_audit`). It then has the number of comparisons that found a difference,
        the number of periods without engine statistics to compare with, the largest difference in
        blocks, and three numbers of requests: aborted ones without a final response, ones that the
        engine lost, and ones for which the engine found fewer cached tokens than the scheduler
        expected.
        """
        audit = self.audit
        counts = {
            "drifts": audit.num_drifts,
            "missed_checks": audit.num_missed,
            "worst_drift_blocks": audit.worst_drift,
            "given_up": self.num_unconfirmed_aborts,
            "forgotten": self.num_lost,
            "cache_misses": self.num_cache_misses,
        }
        if not any(counts.values()):
            return ""
        return " ".join(
            f"{name}={count}" for name, count in {"checks": audit.num_checks, **counts}.items()
        )

    def close(self) -> None:
        """Abort all requests and shut the engine down; see `EngineHandle.close` for the time limit.
        Idempotent.
        """
        if not self._is_closed:
            self._is_closed = True
            self._engine.close()
            self._responses.close()

    def _occupy_slot(self, request: Request, num_cached: int) -> SubmittedRequest:
        spec = request.spec
        submitted = SubmittedRequest(
            spec=spec,
            tokens=request.tokens,
            slot=request.slot,
            num_blocks=-(-self.info.num_kept_tokens(spec.max_total_tokens) // self.info.block_size),
            num_cached=num_cached,
        )
        self._submitted[request.slot] = submitted
        return submitted

    def _release_slot(self, slot: int) -> SubmittedRequest | None:
        """Release a slot; return its request if it must be aborted: it was submitted, and the
        engine has not ended it. Otherwise return None.
        """
        submitted = self._submitted.pop(slot)
        submitted.slot = -1
        self._watchdog.remove(submitted, self._clock())
        return submitted if self._blocks.release(submitted) else None

    def _log_account(self, now_s: float) -> None:
        if now_s >= self._next_account_s:
            self._next_account_s = now_s + _ACCOUNT_INTERVAL_S
            account = self.account()
            if account != self._logged_account:
                self._logged_account = account
                logger.info("engine account: %s", account)

    def _send_to_engine(self, aborts: list[SubmittedRequest]) -> None:
        submits = list(self._blocks.next_submissions())
        if aborts or submits:
            self._watchdog.expect(submits, self._clock())
            self._engine.abort_and_submit(aborts, submits)

    def _check_pages(self, batch: Batch, num_unanswered_blocks: int) -> None:
        now_s = self._clock()
        # Blocks that the engine allocates ahead per request, including those for drafts, and blocks
        # of aborted requests.
        ahead = self._blocks.num_in_engine * self._num_blocks_ahead
        slack = ahead + self._blocks.num_aborted_blocks
        # Between iterations, the engine may have released some blocks and not yet allocated others.
        self.audit.record_expected(max(0, batch.num_old_blocks - num_unanswered_blocks), now_s)
        self.audit.record_expected(batch.num_used_blocks, now_s, slack_blocks=slack)
        stats = self._responses.take_stats()
        if stats is None:
            self.audit.expect_check(now_s, is_busy=self._blocks.num_in_engine > 0)
        else:
            self.audit.check(stats.num_used_blocks)
