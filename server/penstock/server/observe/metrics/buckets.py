"""Where the buckets of histograms end.

Owns the bounds. Small models on fast devices make a token in under a millisecond, large ones on
CPUs take seconds: the bounds span both, two or three to the doubling where an alert would look.
"""

from typing import Final

TOKEN_SECONDS: Final = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Between two tokens, and for a step of the engine."""
FIRST_TOKEN_SECONDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
"""Until the first token, and for the phases before it."""
REQUEST_SECONDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96,
    81.92, 163.84, 327.68, 655.36, 1310.72, 2621.44,
)  # fmt: skip
"""A whole request; the doublings are those of the OpenTelemetry conventions."""
OVERHEAD_SECONDS: Final = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 1.0,
)  # fmt: skip
"""What should be next to nothing: the scheduler's share of a step, an event loop's lag."""
TOKENS: Final = (
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072,
    262144, 1048576,
)  # fmt: skip
REQUESTS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Requests of one step."""
MESSAGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
