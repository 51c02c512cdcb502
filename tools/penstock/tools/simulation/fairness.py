"""How evenly tenants were served while they competed.

Owns the definition: only times count in which every tenant had requests waiting, because a
tenant without requests is owed nothing. Service is counted as by the scheduler's fair order:
weighted tokens (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
"""

import numpy as np
from numpy.typing import NDArray

from penstock.tools.simulation.recorder import RunRecorder
from penstock.tools.simulation.request_table import RequestTable

PROMPT_TOKEN_WEIGHT = 1.0
OUTPUT_TOKEN_WEIGHT = 2.0


def tenant_service(recorder: RunRecorder) -> NDArray[np.float64]:
    """Weighted tokens per bin and tenant, float64 [bins, tenants].

    A prompt counts at the first token, without what was found in the cache.
    """
    served: NDArray[np.float64] = np.asarray(recorder.served_tokens(), dtype=np.float64)
    served *= OUTPUT_TOKEN_WEIGHT
    table = recorder.table
    first_token_s = table.seconds("first_token_s")
    has_token = ~np.isnan(first_token_s)
    bins = (first_token_s[has_token] / recorder.timeline_bin_s).astype(np.int64)
    num_computed = table.counts("num_prompt_tokens") - table.counts("num_cached_tokens")
    np.add.at(
        served,
        (bins, table.counts("tenant")[has_token]),
        PROMPT_TOKEN_WEIGHT * num_computed[has_token],
    )
    return served


def served_ratio(
    table: RequestTable, service: NDArray[np.float64], timeline_bin_s: float
) -> float | None:
    """Greatest over smallest service of a tenant while all of them had requests waiting.

    `service` float64 [bins, tenants]. 1 is even; infinite: a tenant got nothing. None with fewer
    than two tenants, or when they never waited at the same time for a whole bin.
    """
    num_bins, num_tenants = service.shape
    if num_tenants < 2 or not num_bins:
        return None
    edges_s: NDArray[np.float64] = np.arange(num_bins + 1, dtype=np.float64)
    edges_s *= timeline_bin_s
    waiting = np.stack([_num_waiting(table, t, edges_s) for t in range(num_tenants)], axis=1)
    is_contended = (np.minimum(waiting[:-1], waiting[1:]) > 0).all(axis=1)
    if not is_contended.any():
        return None
    totals = service[is_contended].sum(axis=0)
    lowest = float(totals.min())
    return float(totals.max()) / lowest if lowest else float("inf")


def _num_waiting(table: RequestTable, tenant: int, at_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Requests of a tenant that have arrived but were never admitted, int64 [len(at_s)]."""
    is_its = table.counts("tenant") == tenant
    admitted_s = table.seconds("admitted_s")[is_its]
    # Who was refused or expired stops waiting when that happened.
    left_s = np.where(np.isnan(admitted_s), table.seconds("end_s")[is_its], admitted_s)
    arrived = np.searchsorted(table.seconds("arrival_s")[is_its], at_s, side="right")
    left = np.searchsorted(np.sort(left_s), at_s, side="right")
    return arrived - left
