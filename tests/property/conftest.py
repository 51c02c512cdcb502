"""Failed invariants of the state machine print their values."""

import pytest

pytest.register_assert_rewrite("property.engine_machine", "property.engine_invariants")
