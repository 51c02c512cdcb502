"""The keys of `--scheduler`: a JSON object with the scheduler's settings under their names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.scheduler.config import SchedulerConfig
from penstock.server.settings.sources import read_object
from penstock.server.settings.table import Declared, declared
from penstock.tools.simulation.settings import UNBOUNDED_QUEUE

_QUEUE_LIMITS = ("max_num_waiting", "max_num_waiting_tokens")


def _simulated(item: Declared) -> Declared:
    """Return the setting with its default in a simulation."""
    if item.path in _QUEUE_LIMITS:
        return replace(item, default=getattr(UNBOUNDED_QUEUE, item.path))
    if item.path == "max_num_batched_tokens":
        return replace(item, setting=replace(item.setting, shown=""))
    return item


SCHEDULER_KEYS: Final = tuple(
    _simulated(item) for item in declared(SchedulerConfig, has_all=True) if item.path != "order"
)


def scheduler_of(values: Mapping[str, Any], num_step_tokens: int | None) -> SchedulerConfig:
    """Return the scheduler's settings from the JSON object of `--scheduler`. `num_step_tokens`: the
    value of --max-num-batched-tokens, None if it was not given. Raises BadSetting.
    """
    sources = read_object(SCHEDULER_KEYS, values, "--scheduler: ")
    derived: dict[str, Any] = {name: sources.value(name) for name in _QUEUE_LIMITS}
    if num_step_tokens is not None:
        derived["max_num_batched_tokens"] = num_step_tokens
    return sources.build(SchedulerConfig, derived)
