"""Metadata of a recording: the model, the limits, the engine, and the clock offset.

Owns the value and its JSON. Times in a recording are on the machine's monotonic clock; a pair of
readings converts them to Unix time.
"""

import json
import time
from dataclasses import dataclass
from importlib import metadata

from penstock.executor.config_json import from_json_value, parse_json, to_json_value
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo

_MAX_MODEL_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFacts:
    """The engine of a recording. `block_size` in tokens.

    `epoch` increases with every start of an engine. `clock_s` and `unix_s` are the same time on the
    monotonic clock and in seconds since 1970. `is_self_paced`: the executor batches by itself, so
    a step is one iteration that collects what has arrived, without a predicted time.
    """

    model: str
    executor: str
    epoch: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    pipeline_depth: int
    is_self_paced: bool
    clock_s: float
    unix_s: float
    version: str

    def unix_time_s(self, at_s: float) -> float:
        """A time of the recording in seconds since 1970."""
        return self.unix_s + (at_s - self.clock_s)


def facts_of(model: str, epoch: int, info: ExecutorInfo, config: SchedulerConfig) -> FlightFacts:
    """The facts of an engine that starts now."""
    return FlightFacts(
        model=model[:_MAX_MODEL_CHARS],
        executor=info.name,
        epoch=epoch,
        max_num_seqs=info.max_num_seqs,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pipeline_depth=info.pipeline_depth,
        is_self_paced=info.is_self_paced,
        clock_s=time.monotonic(),
        unix_s=time.time(),
        version=_version(),
    )


def encode_facts(facts: FlightFacts) -> bytes:
    """The JSON in the header."""
    return json.dumps(to_json_value(facts)).encode("ascii")


def decode_facts(data: bytes) -> FlightFacts:
    """The inverse of `encode_facts`. Raises ValueError for anything else."""
    return from_json_value(FlightFacts, parse_json(data.decode("ascii")), "facts")


def _version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "unknown"
