"""A snapshot and the live requests as JSON, for the status page and for scripts.

Owns the form: the keys are the names of the dataclasses in `operations.snapshot`, and what is not
a finite number is null.
"""

import dataclasses
import json
import math
from typing import Any, Final, cast

from penstock.server.observe.operations.snapshot import RequestView, Snapshot

MAX_REQUESTS: Final = 500
"""Requests that are told: the oldest. How many there are is told beside them."""


def status_json(
    snapshot: Snapshot, requests: tuple[RequestView, ...], requests_problem: str = ""
) -> bytes:
    """UTF-8. `requests_problem`: why the live requests are not known, for the reader."""
    status = dataclasses.asdict(snapshot)
    status["requests"] = [dataclasses.asdict(request) for request in requests[:MAX_REQUESTS]]
    status["num_requests"] = len(requests)
    status["requests_problem"] = requests_problem
    # Inside a page, `</script>` would end a script element; escaped, the text is safe there too.
    text = json.dumps(_finite(status), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        entries = cast(dict[str, Any], value)
        return {key: _finite(entry) for key, entry in entries.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in cast(list[Any], value)]
    return value
