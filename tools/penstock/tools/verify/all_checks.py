"""The checks of `penstock verify`, in order. Each module owns the checks of one subject."""

from penstock.tools.verify import (
    endings,
    forms,
    generation,
    load,
    reuse,
    sampling,
    service,
    steering,
)

ALL_CHECKS = (
    *service.CHECKS,
    *generation.CHECKS,
    *sampling.CHECKS,
    *steering.CHECKS,
    *forms.CHECKS,
    *reuse.CHECKS,
    *endings.CHECKS,
    *load.CHECKS,
)
"""Every check, the simplest first: a check follows the checks that it depends on."""
