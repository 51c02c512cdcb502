"""Runs engines with a flight recorder on a simulated executor, and keeps the events, notes and
measures of their steps for comparison with the recording.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.executor.config import SimulatedConfig
from penstock.executor.simulated.clock import VirtualClock
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel, StepMeasure, measure_of
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Failed, Preempted, StepEvents
from penstock.scheduler.listener import StepNote
from penstock.scheduler.request import NO_TIME, RequestSpec
from penstock.server.observe.flight.layout import facts_of
from penstock.server.observe.flight.memory import create_memory
from penstock.server.observe.flight.reader import FlightReader, Recording
from penstock.server.observe.flight.writer import FlightWriter
from penstock.server.observe.listeners import EngineListeners
from support.core import simulated_executor

COST = CostModel(step_s=0.003, prefill_token_s=40e-6, decode_slot_s=100e-6, context_token_s=200e-9)
BEGIN_S = 1000.0


def make_executor(clock: VirtualClock, *, depth: int = 1, **limits: int) -> SimulatedExecutor:
    """Return a simulated executor, by default with 60 blocks of 16 tokens and 8 slots."""
    sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 60, "max_num_seqs": 8} | limits
    simulated = SimulatedConfig(cost=COST)
    return simulated_executor(
        clock, COST, max_seq_len=2048, pipeline_depth=depth, simulated=simulated, **sizes
    )


class _CopyingListeners(EngineListeners):
    """Engine listeners that also add each step note and its measure to `recorded`."""

    def __init__(self, recorded: "RecordedEngine") -> None:
        super().__init__(recorded.writer)
        self._recorded = recorded

    def note_iteration(self, events: StepEvents, note: StepNote | None) -> None:
        if note is not None:
            self._recorded.notes.append(note)
            self._recorded.measures.append(measure_of(note.batch, 0.0))
        super().note_iteration(events, note)


@dataclass(slots=True, eq=False)
class RecordedEngine:
    """An engine with a flight recorder, and its events, step notes and step measures as observed
    without the recorder.
    """

    depth: int = 1
    num_steps: int = 1024
    num_blocks: int = 60
    max_num_seqs: int = 8
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(BEGIN_S))
    reported: list[StepEvents] = field(default_factory=list)
    notes: list[StepNote] = field(default_factory=list)
    # A note contains the batch, but the lengths of its rows change after the step.
    measures: list[StepMeasure] = field(default_factory=list)
    num_output: Counter[int] = field(default_factory=Counter)
    fd: int = -1
    engine: Engine = field(init=False)
    writer: FlightWriter = field(init=False)

    def __post_init__(self) -> None:
        limits = {"num_blocks": self.num_blocks, "max_num_seqs": self.max_num_seqs}
        executor = make_executor(self.clock, depth=self.depth, **limits)
        config = SchedulerConfig()
        if self.fd < 0:
            self.fd = create_memory(self.num_steps, "test")
        self.writer = FlightWriter(self.fd, facts_of("demo", 1, executor.info, config))
        self.engine = Engine(executor, config, self.clock, listener=_CopyingListeners(self))

    def submit(
        self, key: int, num_prompt: int, max_tokens: int, *, num_outputs: int = 1, **more: Any
    ) -> None:
        """Submit the outputs with keys `key` .. `key + num_outputs - 1`."""
        self.engine.submit(
            tuple(
                RequestSpec(
                    key=key + output,
                    request_id=f"request-{key}",
                    prompt_ids=np.full(num_prompt, 31_000 + key % 900, np.int32),
                    max_tokens=max_tokens,
                    output_index=output,
                    leader_key=key if output else 0,
                    arrival_s=self.clock(),
                    **more,
                )
                for output in range(num_outputs)
            )
        )

    def step(self) -> StepEvents:
        events = self.engine.step()
        self.engine.check_integrity()
        self.reported.append(events)
        self.num_output.update(events.keys.tolist())
        return events

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("still busy")

    def recording(self) -> Recording:
        reader = FlightReader(self.fd)
        try:
            return reader.recording()
        finally:
            reader.close()

    def changes(self, kind: type[Admitted | Preempted]) -> list[Any]:
        return [c for events in self.reported for c in events.changes if isinstance(c, kind)]

    @property
    def ends(self) -> dict[int, Completed | Failed]:
        return {end.key: end for events in self.reported for end in events.ends}


def play(recorded: RecordedEngine, seed: int, num_requests: int = 60) -> RecordedEngine:
    """Run random traffic with preemptions, cancels, missed deadlines and rejections; return
    `recorded`, in which some requests are unfinished.
    """
    random = np.random.default_rng(seed)
    key = 1
    for number in range(num_requests):
        num_outputs = int(random.integers(1, 4)) if random.random() < 0.2 else 1
        is_urgent = random.random() < 0.1
        recorded.submit(
            key,
            int(random.integers(1, 300)) if number != 3 else 1500,  # more than the cache holds
            int(random.integers(1, 60)),
            num_outputs=num_outputs,
            deadline_s=recorded.clock() + 0.2 if is_urgent else NO_TIME,
            tenant=str(random.choice(["", "acme", "zürich"])),
            priority=int(random.integers(0, 2)),
            trace_id=random.bytes(16) if random.random() < 0.5 else b"",
        )
        key += num_outputs
        for _ in range(int(random.integers(0, 6))):
            recorded.step()
        if random.random() < 0.2:
            recorded.engine.cancel(int(random.integers(1, key)))
    return recorded


def parsed(pieces: Any) -> dict[str, Any]:
    """Parse a timeline's JSON; raise AssertionError for constants that are not JSON (NaN)."""

    def reject(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    document: dict[str, Any] = json.loads(b"".join(pieces), parse_constant=reject)
    return document
