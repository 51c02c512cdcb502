"""Makes failed assertions of the engine machine and of its invariants print their values."""

import pytest

pytest.register_assert_rewrite("property.engine_machine", "property.engine_invariants")
