"""Case 40: every decoder of untrusted bytes raises only its documented exceptions for mutated
messages.

Unlike `run_atheris.py`, which is guided by branch coverage, this test requires no additional
package.
"""

from __future__ import annotations

import os
import random

import pytest

from fuzz.corpus import mutated
from fuzz.targets import TARGETS, corpus

NUM_MUTATIONS = int(os.environ.get("PENSTOCK_FUZZ_MUTATIONS", "2000"))


@pytest.mark.parametrize("name", TARGETS)
def test_case_40_decoders_raise_only_documented_errors(name: str) -> None:
    target, found = TARGETS[name], corpus(name)
    others = dict(enumerate(found))
    draw = random.Random(name)
    for data in found:
        target(data)
    for _ in range(NUM_MUTATIONS):
        data = mutated(draw.choice(found), draw, others)
        try:
            target(data)
        except Exception as error:
            pytest.fail(f"{type(error).__name__} {error} on {data.hex()}")
