"""One simulated server: an engine, its virtual clock, and the gate (see `gate`) in front of it.

In virtual time a step takes the time predicted by the cost model, and idle time is skipped.
Requests that arrive during a step are submitted after it, as in the engine process of a real
service. With several replicas, run all of them until a request's arrival, then offer it to one.
"""

import math
import threading

from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import NO_TIME, RequestSpec
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.gate import Gate
from penstock.tools.simulation.prompts import PromptMaker
from penstock.tools.simulation.recorder import RunRecorder
from penstock.tools.simulation.settings import (
    SimulationConfig,
    build_engine,
    build_gate,
)
from penstock.tools.simulation.watched_executor import STOP_ID

_NEVER_SET = threading.Event()


class SimulationStuck(Exception):
    """Requests remain that can never run, which indicates a bug in the scheduler."""


class Replica:
    """A simulated server; `offer` submits a request, `run_until` runs it to a given virtual
    time.
    """

    def __init__(self, config: SimulationConfig, recorder: RunRecorder) -> None:
        self._clock = VirtualClock()
        self.engine: Engine = build_engine(
            config, self._clock, recorder.note_prefill, recorder.table.output_length
        )
        self._gate: Gate = build_gate(config)
        self._max_tokens = config.max_tokens
        self._recorder = recorder
        info = self.engine.executor.info
        self._prompts = PromptMaker(
            vocab_size=info.vocab_size,
            block_size=info.block_size,
            has_prefix_caching=config.has_prefix_caching,
        )

    @property
    def now_s(self) -> float:
        """The virtual time, in seconds."""
        return self._clock()

    @property
    def num_unfinished(self) -> int:
        """Number of requests that run or wait in this replica."""
        return len(self._gate) + len(self.engine.queue) + len(self.engine.running)

    def offer(self, request: TraceRequest) -> None:
        """Submit a request; call `run_until` with its arrival time first."""
        key = self._recorder.table.add(request)
        tenant_index = self._recorder.table.tenant_index(request.tenant)
        prompt = self._prompts.make(request, tenant_index)
        num_output, asked = request.num_output_tokens, self._max_tokens
        self._gate.offer(
            RequestSpec(
                key=key,
                request_id=str(key),
                prompt_ids=prompt.token_ids,
                max_tokens=max(num_output, asked or 1),
                min_tokens=num_output if asked is None else 0,
                stop_ids=() if asked is None else (STOP_ID,),
                hash_salt=prompt.hash_salt,
                block_hashes=prompt.block_hashes,
                priority=request.priority,
                arrival_s=request.arrival_s,
                ttft_deadline_s=request.arrival_s + request.ttft_deadline_s,
                deadline_s=request.arrival_s + request.deadline_s,
                tenant=request.tenant,
            )
        )

    def run_until(self, until_s: float) -> None:
        """Run until virtual time is at least `until_s`; if that is infinite, until there is no
        work.

        Virtual time is greater than `until_s` afterwards if the last step ended later. Raises
        SimulationStuck.
        """
        clock, engine, gate = self._clock, self.engine, self._gate
        while clock() < until_s:
            is_idle = not engine.has_work
            for spec in gate.admit(clock(), is_idle=is_idle):
                engine.submit((spec,))
            if engine.has_work:
                self._step(until_s)
                continue
            at_s = min(until_s, gate.next_opening_s())
            if at_s == math.inf:
                return
            clock.wait_until(at_s, _NEVER_SET)

    def finish(self) -> None:
        """Run until every request has ended, and check the engine's integrity; call it after the
        last `offer`. Raises SimulationStuck.
        """
        self._gate.close()
        self.run_until(math.inf)
        self.engine.check_integrity()

    def _step(self, until_s: float) -> None:
        before_s = self._clock()
        events = self.engine.step()
        self._recorder.note(events, self.engine, len(self._gate))
        if self._clock() > before_s or not events.is_empty or not self.engine.has_work:
            return
        # No request could run until time passes or another request arrives.
        at_s = min(until_s, self.engine.next_wakeup_s())
        if at_s == NO_TIME:
            raise SimulationStuck(f"at {before_s} s no request runs, ends or arrives")
        self._clock.wait_until(at_s, _NEVER_SET)
