"""Who may join the queue.

Owns the refusals at submission, in order: an id that is in use, a size that can never fit, a time
that has passed, a full queue or a tenant over its part of it, and a deadline that cannot be met.
Changes nothing.
"""

from collections.abc import Container, Sequence

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.outlook import Outlook, Prospect, Verdict
from penstock.scheduler.request import FailureReason, Request, RequestSpec
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.waiting_queue import WaitingQueue


class Door:
    """Looks at requests before they wait; the outputs of one request are let in or refused as one.

    `keys`, `request_ids`: of those who live.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        *,
        cache: KVCache,
        queue: WaitingQueue,
        tenants: Tenants,
        outlook: Outlook,
        keys: Container[int],
        request_ids: Container[str],
    ) -> None:
        self._info = info
        self._config = config
        self._cache = cache
        self._queue = queue
        self._tenants = tenants
        self._outlook = outlook
        self._keys = keys
        self._request_ids = request_ids

    def look_at(self, requests: Sequence[Request], now: float) -> Prospect:
        """What awaits the outputs of one request, leader first; with a verdict, their refusal."""
        leader = requests[0]
        reason = self._flaw([request.spec for request in requests])
        if reason is not None:
            return Prospect(num_ahead=0, verdict=Verdict(reason=reason))
        if min(leader.spec.deadline_s, leader.spec.ttft_deadline_s) <= now:
            return Prospect(num_ahead=0, verdict=self._outlook.dropped(leader, now))
        reason = self._crowd(requests)
        if reason is not None:
            verdict = self._outlook.crowded(leader, reason, now)
            return Prospect(num_ahead=0, verdict=verdict)
        return self._outlook.prospect(leader, now)

    def _flaw(self, specs: Sequence[RequestSpec]) -> FailureReason | None:
        """What is wrong with the request itself."""
        keys = {spec.key for spec in specs}
        is_known = specs[0].request_id in self._request_ids
        if is_known or len(keys) < len(specs) or any(key in self._keys for key in keys):
            return FailureReason.REQUEST_ID_IN_USE
        for spec in specs:
            reason = self._misfit(spec)
            if reason is not None:
                return reason
        return None

    def _misfit(self, spec: RequestSpec) -> FailureReason | None:
        """Why this output could not run even on an idle engine."""
        if spec.max_total_tokens > self._info.max_seq_len:
            return FailureReason.PROMPT_TOO_LONG
        num_kept = self._info.num_kept_tokens(spec.max_total_tokens)
        if self._cache.blocks_for(num_kept) > self._cache.pool.num_blocks:
            return FailureReason.EXCEEDS_KV_CACHE
        return None

    def _crowd(self, requests: Sequence[Request]) -> FailureReason | None:
        """Which bound of the queue has no room for them.

        Nobody is told to come back for room that there will never be: what is more than a bound by
        itself is let in while nobody else waits.
        """
        config, queue = self._config, self._queue
        num_tokens = sum(len(request.tokens) for request in requests)
        if len(queue) and (
            len(queue) + len(requests) > config.max_num_waiting
            or queue.num_tokens + num_tokens > config.max_num_waiting_tokens
        ):
            return FailureReason.QUEUE_FULL
        most = config.max_num_waiting_per_tenant
        if most is not None:
            tenants = {request.spec.tenant for request in requests}
            num_waiting = max(self._tenants.num_waiting_of(tenant) for tenant in tenants)
            if num_waiting and num_waiting + len(requests) > most:
                return FailureReason.TENANT_OVER_QUOTA
        return None
