"""Decides which requests may join the queue (admission control).

A request is rejected at submission for one of these reasons, checked in this order: a request id in
use, a size that can never fit, a deadline that has passed, more outputs than may ever wait or be
live together, a tenant over a quota or over its limit of waiting requests, a full queue, and a
deadline that cannot be met. When the queue is full, a request may displace others
(displacement.py). A replayed request is rejected only for the first three reasons. The checks do
not change the queue. They mark a request that is admitted to test the predictions
(`Request.is_trial`) or to learn a new tenant's output lengths (`is_new`), and record arrivals in
the predictor.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.deadline_predictor import DeadlinePredictor, QueueEstimate, Rejection
from penstock.scheduler.displacement import Displacement
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.quotas import QuotaAccounts, QuotaBreach, QuotaKind
from penstock.scheduler.request import FailureReason, Request, RequestSpec
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.transitions import LiveRequests
from penstock.scheduler.waiting_queue import WaitingQueue


class AdmissionControl:
    """Decides whether a request joins the queue. The outputs of one request are admitted or
    rejected together.
    """

    def __init__(  # noqa: PLR0913 - each is one thing that a check depends on
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        *,
        cache: KVCache,
        queue: WaitingQueue,
        displacement: Displacement,
        tenants: TenantCounters,
        quotas: QuotaAccounts,
        predictor: DeadlinePredictor,
        requests: LiveRequests,
    ) -> None:
        self._info = info
        self._config = config
        self._cache = cache
        self._queue = queue
        self._displacement = displacement
        self._tenants = tenants
        self._quotas = quotas
        self._predictor = predictor
        self._requests = requests

    def check(self, requests: Sequence[Request], now: float) -> QueueEstimate:
        """Return the queue estimate for one request, given its outputs in order.

        If the request is not admitted, the estimate contains the rejection. Sets `is_trial` and
        `is_new` of the outputs.
        """
        leader = requests[0]
        reason = self._validate([request.spec for request in requests])
        if reason is not None:
            return QueueEstimate(num_ahead=0, rejection=Rejection(reason=reason))
        if min(leader.spec.deadline_s, leader.spec.ttft_deadline_s) <= now:
            return QueueEstimate(
                num_ahead=0, rejection=self._predictor.expired_rejection(leader, now)
            )
        # A replayed request was admitted before: it is not rejected when many requests are replayed
        # at once.
        if leader.spec.num_replays:
            return self._predictor.estimate(leader, now)
        rejection = self._check_limits(requests, now)
        displaced = None if rejection is not None else self._displaced(requests)
        if displaced is None:
            full = rejection or self._predictor.limit_rejection(
                leader, FailureReason.QUEUE_FULL, now
            )
            return QueueEstimate(num_ahead=0, rejection=full)
        estimate = self._predictor.estimate(leader, now)
        for follower in requests[1:]:
            follower.is_trial, follower.is_new = leader.is_trial, leader.is_new
        return replace(estimate, displaced=displaced) if displaced else estimate

    def _validate(self, specs: Sequence[RequestSpec]) -> FailureReason | None:
        """Return the failure reason if the request's id is in use or an output can never fit, else
        None.
        """
        keys = {spec.key for spec in specs}
        is_known = self._requests.has_id(specs[0].request_id)
        if is_known or len(keys) < len(specs) or any(key in self._requests for key in keys):
            return FailureReason.REQUEST_ID_IN_USE
        for spec in specs:
            reason = self._size_failure(spec)
            if reason is not None:
                return reason
        return None

    def _size_failure(self, spec: RequestSpec) -> FailureReason | None:
        """Return the failure reason if this output cannot run even on an idle engine, else None."""
        if spec.max_total_tokens > self._info.max_seq_len:
            return FailureReason.PROMPT_TOO_LONG
        num_kept = self._info.num_kept_tokens(spec.max_total_tokens)
        if self._cache.blocks_for(num_kept) > self._cache.pool.num_blocks:
            return FailureReason.EXCEEDS_KV_CACHE
        return None

    def _check_limits(self, requests: Sequence[Request], now: float) -> Rejection | None:
        """Return the rejection if a limit of the queue or of the tenant is exceeded, else None."""
        return self._too_many(requests) or self._over_quota(requests, now)

    def _too_many(self, requests: Sequence[Request]) -> Rejection | None:
        """Return the rejection if the request has more outputs than may ever wait or be live
        together, else None.
        """
        num_outputs, breach = len(requests), None
        most = self._quotas.quota_of(requests[0].spec.tenant).max_num_live
        if most is not None and num_outputs > most:
            breach = QuotaBreach(kind=QuotaKind.NUM_LIVE, limit=most, retry_after_s=math.inf)
        if breach is None and num_outputs <= self._config.max_num_waiting:
            return None
        return Rejection(
            reason=FailureReason.TOO_MANY_OUTPUTS, retry_after_s=math.inf, breach=breach
        )

    def _over_quota(self, requests: Sequence[Request], now: float) -> Rejection | None:
        """Return the rejection if the tenant exceeds a quota or its limit of waiting requests, else
        None.
        """
        leader = requests[0]
        tenant, num_prompt_tokens = leader.spec.tenant, leader.spec.num_prompt_tokens
        breach = self._quotas.breach_of(tenant, num_prompt_tokens, len(requests), now)
        if breach is not None:
            return Rejection(
                reason=FailureReason.TENANT_OVER_QUOTA,
                retry_after_s=breach.retry_after_s,
                breach=breach,
            )
        most = self._config.max_num_waiting_per_tenant
        num_waiting = self._tenants.num_waiting_of(tenant)
        if most is None or not num_waiting or num_waiting + len(requests) <= most:
            return None
        rejection = self._predictor.limit_rejection(leader, FailureReason.TENANT_OVER_QUOTA, now)
        breach = QuotaBreach(
            kind=QuotaKind.NUM_WAITING, limit=most, retry_after_s=rejection.retry_after_s
        )
        return replace(rejection, breach=breach)

    def _displaced(self, requests: Sequence[Request]) -> tuple[Request, ...] | None:
        """Return the waiting requests that `requests` displace, or None if the queue stays too
        full.

        A request whose prompts alone exceed `max_num_waiting_tokens` is admitted only while the
        queue is empty, since it would never fit otherwise.
        """
        config, queue = self._config, self._queue
        num_over = len(queue) + len(requests) - config.max_num_waiting
        num_tokens = sum(len(request.tokens) for request in requests)
        num_tokens_over = queue.num_tokens + num_tokens - config.max_num_waiting_tokens
        if not len(queue) or (num_over <= 0 and num_tokens_over <= 0):
            return ()
        if config.order is not SchedulingOrder.FAIR:
            return None
        units = self._displacement.displaced_by(requests, num_over, num_tokens_over)
        if units is None:
            return None
        # The leader of each request comes last, so that no follower replaces it in between.
        return tuple(request for unit in units for request in reversed(unit))
