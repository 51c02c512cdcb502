"""Lists the checks of `penstock verify` in the order in which they run."""

from penstock.tools.verify import (
    constraints,
    endings,
    generation,
    load,
    reuse,
    sampling,
    sampling_effects,
    service,
)

ALL_CHECKS = (
    *service.CHECKS,
    *generation.CHECKS,
    *sampling.CHECKS,
    *sampling_effects.CHECKS,
    *constraints.CHECKS,
    *reuse.CHECKS,
    *endings.CHECKS,
    *load.CHECKS,
)
"""Every check, in the order in which they run: simple ones first, and each after those whose
results it needs.
"""
