"""Creates gRPC's service config for a target. The service config determines how calls are balanced
over the addresses of a name.

The service config is JSON (gRFC A2 and the load balancing config of A24). It has no retry policy,
for two reasons: gRPC cannot take error reasons, deadlines and delivered output into account, as
`retry.py` does; and two nested policies would multiply their attempts.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.client.retry import RetryPolicy

_ROUND_ROBIN_SCHEMES = ("dns", "ipv4", "ipv6")
_SERVICES = ("penstock.v1.GenerationService", "penstock.v1.ModelService")
_ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


def default_service_config(target: str) -> str | None:
    """Return the service config for round robin if `target` may name several servers.

    Otherwise returns None, which means gRPC's default: the first address that accepts a connection.
    The default is kept for a plain HOST:PORT, because the addresses of one host lead to the same
    server. A resolver's configuration takes precedence.
    """
    scheme, separator, _ = target.partition(":")
    return _ROUND_ROBIN if separator and scheme in _ROUND_ROBIN_SCHEMES else None


def check_service_config(text: str, retry: RetryPolicy) -> None:
    """Raise ValueError if `text` is not JSON in the form of a service config, or if both it and
    `retry` enable retries."""
    try:
        config: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"service_config: not JSON: {error}") from None
    _require(isinstance(config, dict), "must be a JSON object")
    methods = config.get("methodConfig", [])
    _require(isinstance(methods, list), "methodConfig must be a list")
    has_retries = [_has_retries(method) for method in methods]
    if retry.max_attempts > 1 and any(has_retries):
        raise ValueError(
            "service_config: has retries, and this client retries as well: their attempts "
            "would multiply; give retry=NO_RETRY with it"
        )


def retry_service_config(policy: RetryPolicy) -> str:
    """Return gRPC's service config with the part of `policy` that gRPC supports, for other clients.

    gRPC retries only before the first message, and respects grpc-retry-pushback-ms. It retries by
    status and not by reason, so RESOURCE_EXHAUSTED is left out, because a message that is too large
    would be sent again. `max_attempts` is limited to gRPC's maximum of 5. Raises ValueError if it
    is below 2.
    """
    if policy.max_attempts < 2:
        raise ValueError("max_attempts: a retry policy needs at least two attempts")
    method: Mapping[str, Any] = {
        "name": [{"service": service} for service in _SERVICES],
        "retryPolicy": {
            "maxAttempts": min(policy.max_attempts, 5),
            "initialBackoff": f"{max(policy.initial_backoff_s, 1e-3):.3f}s",
            "maxBackoff": f"{max(policy.max_backoff_s, 1e-3):.3f}s",
            "backoffMultiplier": policy.multiplier,
            "retryableStatusCodes": ["UNAVAILABLE"],
        },
    }
    return json.dumps({"methodConfig": [method]})


def _has_retries(method: Any) -> bool:
    _require(isinstance(method, dict), "each methodConfig must be an object")
    return "retryPolicy" in method or "hedgingPolicy" in method


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"service_config: {message}")
