"""Decides which decodes pause: those of tenants over their share, in a step that computes prompts
of tenants under their share (fair_share.py).

With a full batch of decodes such a prompt would take up to twice as long.
"""

from collections.abc import Callable, Sequence

from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.request import Request
from penstock.scheduler.running import DecodeRoster, RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.tenant_counters import TenantCounters

MAX_PAUSED_STEPS = 3
"""Maximum number of consecutive steps with a pause."""


class DecodePauses:
    """Pauses decodes for one step at a time, at most `MAX_PAUSED_STEPS` in a row.

    With a target inter-token latency, a step pauses no decodes if the cost model predicts that
    their next token would miss the target. `shares`: returns the present shares of the tenants.
    """

    def __init__(
        self,
        arrays: SlotArrays,
        running: RunningSet,
        tenants: TenantCounters,
        sizing: StepSizing,
        shares: Callable[[], FairShare],
    ) -> None:
        self._arrays = arrays
        self._running = running
        self._tenants = tenants
        self._sizing = sizing
        self._shares = shares
        self._num_steps = 0
        self._time_s = 0.0

    def pause(
        self, under_share: Sequence[Request], chunks: Sequence[PrefillChunk], roster: DecodeRoster
    ) -> bool:
        """Leave decodes in `roster` out of a step that prefills `chunks`; return whether any was
        left out.

        `under_share`: the requests among them of tenants under their share. Only tenants that have
        received more service than the tenants of these requests are paused, so that a tenant with
        many short requests delays others only until it has received as much service. Decodes of a
        higher class continue.
        """
        num_steps, self._num_steps = self._num_steps, 0
        time_s, self._time_s = self._time_s, 0.0
        arrays, tenants = self._arrays, self._tenants
        if not under_share or num_steps == MAX_PAUSED_STEPS or tenants.num_live < 2:
            return False
        step_s = self._step_s(chunks)
        if not self._sizing.is_within_target(time_s + step_s + self._next_step_s(roster)):
            return False
        priority = max(request.spec.priority for request in under_share)
        service = tenants.service
        served = max(float(service[request.tenant]) for request in under_share)
        slots = roster.rows.index
        owners = arrays.tenant[slots]
        is_over = ~self._shares().are_under_share(owners) & (service[owners] > served)
        paused = slots[is_over & (arrays.level[slots] <= priority)]
        if not len(paused):
            return False
        self._running.pause_decoding(paused)
        self._num_steps, self._time_s = num_steps + 1, time_s + step_s
        return True

    def _step_s(self, chunks: Sequence[PrefillChunk]) -> float:
        """Return the predicted seconds of a step with these chunks and no decodes."""
        return self._sizing.fit.step_time_s(
            num_prefill_tokens=sum(chunk.count for chunk in chunks),
            num_decodes=0,
            num_context_tokens=sum(chunk.start + chunk.count for chunk in chunks),
        )

    def _next_step_s(self, roster: DecodeRoster) -> float:
        """Return the predicted seconds of the step in which the decodes continue. It is assumed to
        use its whole prefill budget.
        """
        sizing = self._sizing
        return sizing.fit.step_time_s(
            num_prefill_tokens=sizing.prefill_budget_tokens,
            num_decodes=len(roster.rows),
            num_context_tokens=int(roster.starts.sum()),
        )
