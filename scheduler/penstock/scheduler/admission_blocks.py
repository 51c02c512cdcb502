"""Computes how many KV cache blocks an admission takes and how many are available to admissions.

Admission (batch_admission.py) and predictions of queue times (deadline_predictor.py, contention.py)
use the same numbers, so that a request waits for the number of blocks that was predicted. Other
modules decide which requests are admitted.

GUARANTEED_NO_EVICT reserves blocks for the whole output at admission. MAX_UTILIZATION takes only
the blocks of the prompt and of tokens generated before a preemption, and leaves a watermark for the
growth of the running requests.
"""

from collections.abc import Sequence

from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.request import Request
from penstock.scheduler.running import RunningSet


class AdmissionBlocks:
    """Computes the blocks that an admission takes and the blocks available to admissions.

    `may_preempt`: whether running requests may be preempted for an admission.
    """

    def __init__(
        self, info: ExecutorInfo, config: SchedulerConfig, cache: KVCache, running: RunningSet
    ) -> None:
        self._info = info
        self._cache = cache
        self._running = running
        self._is_guaranteed = config.admission_policy is AdmissionPolicy.GUARANTEED_NO_EVICT
        # A self-paced engine manages its own memory.
        self.may_preempt = not (self._is_guaranteed or info.is_self_paced)
        # A reservation for the whole output needs no slack.
        self._watermark_blocks = (
            0 if self._is_guaranteed else -int(-config.watermark * info.num_blocks // 1)
        )
        # TensorRT-LLM does not count reusable blocks at admission, so a request admitted here would
        # wait there (getRemainingBlocksToCompletion; until NVIDIA PR #11637).
        self._counts_no_reuse = info.is_self_paced and self._is_guaranteed

    def num_tokens(self, request: Request) -> int:
        """Return the number of tokens that the admission of a request reserves blocks for."""
        if self._is_guaranteed:
            return self._info.num_kept_tokens(request.spec.max_total_tokens)
        return len(request.tokens)

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that a request holds once admitted, including shared and
        reserved blocks.
        """
        return self._cache.blocks_for(self.num_tokens(request))

    def num_taken(self, request: Request, matched: Sequence[int]) -> int:
        """Return how many of the `num_left` blocks an admission takes.

        These are the blocks that the request will hold, without blocks in `matched` that running
        requests already use. For a self-paced executor (see `ExecutorInfo`) with
        GUARANTEED_NO_EVICT, they are all blocks that the request will hold, used blocks included.
        """
        counted = () if self._counts_no_reuse else matched
        return self._cache.num_taken(counted, self.num_tokens(request))

    @property
    def num_left(self) -> int:
        """Number of blocks available to admissions: not used, not reserved and, while any request
        runs, not part of the watermark. Negative if less than the watermark is free.
        """
        cache = self._cache
        # A request that runs alone may take every block.
        kept_free = self._watermark_blocks if len(self._running) else 0
        return cache.pool.num_available - cache.num_reserved - kept_free
