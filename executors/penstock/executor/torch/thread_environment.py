"""How OpenMP's threads wait, said in the environment before torch loads. Imports nothing heavy.

Fronts share the machine's cores with the engine. Threads that spin between two operators for long
are what every other process pays for, and they pay back: two that wait for each other lose a
scheduler's slice per operator when a third process runs (a decode step of 64 then takes 3 to 7
times as long). Threads that go to sleep at once cost a wake-up per operator (1.5 times as long on
an idle machine). A spin of about the length of the gap between two operators avoids both.
"""

from types import MappingProxyType

THREAD_ENVIRONMENT = MappingProxyType(
    {
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "1000",  # GNU's runtime, which torch brings on Linux; others ignore it
    }
)
"""Variables for the process that runs the executor; what an operator has set goes before them."""
