"""Settings are converted to JSON and back, with a value type that no executor's settings use."""

from __future__ import annotations

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.server.settings.json_values import from_json_value, to_json_value


def test_a_mapping_survives_a_json_round_trip_and_its_values_are_checked() -> None:
    config = SchedulerConfig(tenant_weights={"gold": 2.0, "lead": 0.5})

    assert from_json_value(SchedulerConfig, to_json_value(config)) == config
    with pytest.raises(ValueError, match=r"tenant_weights\.gold must be"):
        from_json_value(SchedulerConfig, {"tenant_weights": {"gold": "much"}})
    with pytest.raises(ValueError, match="tenant_weights must be an object, not an array"):
        from_json_value(SchedulerConfig, {"tenant_weights": [1.0]})
