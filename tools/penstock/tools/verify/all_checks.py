"""What `penstock verify` checks, in order. Each module owns the checks of one matter."""

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
"""Every check, the plainest first: what a later one rests on has been checked before."""
