"""Defines the candidates that a plan compares, and reads them from JSON.

A candidate is a name with replica settings, router settings and an optional price.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.setting import check, setting
from penstock.server.observe.recording.trace import check_text
from penstock.server.settings.json_values import did_you_mean, from_json_value, to_json_value
from penstock.tools.simulation.routing import RoutingConfig
from penstock.tools.simulation.settings import SimulationConfig

ROUTER_KEYS = frozenset(field.name for field in fields(RoutingConfig))
SCHEDULER_KEYS = frozenset(field.name for field in fields(SchedulerConfig)) - {"order"}
SERVER_KEYS = frozenset(field.name for field in fields(SimulationConfig)) - {"targets", "scheduler"}
_REJECTED = {
    "order": "is set by policy",
    "targets": "are set for the plan",
    "scheduler": "write its fields directly into the candidate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate: the settings of its replicas and of the router in front of them. Raises
    ValueError, naming the field, if one is invalid.

    `price`: the price of one replica, in any unit that all candidates share; None if unknown.
    """

    name: str
    replica: SimulationConfig
    routing: RoutingConfig = RoutingConfig()  # noqa: RUF009 -- frozen
    price: float | None = setting(
        None,
        "candidates",
        "price of a replica, for candidates without one",
        above=0,
        shown="unknown",
    )

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        check_text("name", self.name)
        check(self)


def candidates_from_json(data: object, base: Candidate) -> tuple[Candidate, ...]:
    """Convert `data`, a parsed JSON array of objects, to candidates; omitted fields are taken from
    `base`.

    An object has a `name`, an optional `price`, and fields of SimulationConfig, SchedulerConfig and
    RoutingConfig, except `targets`, `scheduler` and `order`; `cost` is an object of coefficients.
    Names must differ, and all candidates or none must have a price. Raises ValueError if `data` is
    invalid; the error names the field, except for equal names.
    """
    if not isinstance(data, list) or not data:
        raise ValueError("must be an array of objects, at least one")
    items = cast("list[object]", data)
    candidates = tuple(_candidate(item, base, f"[{i}]") for i, item in enumerate(items))
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise ValueError("two candidates have the same name")
    if len({candidate.price is None for candidate in candidates}) > 1:
        raise ValueError("price must be given for all candidates or for none")
    return candidates


def _candidate(data: object, base: Candidate, where: str) -> Candidate:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be an object")
    values = dict(cast("Mapping[str, Any]", data))
    name, price = values.pop("name", None), values.pop("price", base.price)
    if not isinstance(name, str):
        raise ValueError(f"{where}.name must be a string")
    try:
        return _named(name, price, values, base, where)
    except ValueError as error:
        # In a long list, a name is easier to find than an index.
        raise ValueError(f"{error} (candidate {name!a})") from None


def _named(name: str, price: Any, values: dict[str, Any], base: Candidate, where: str) -> Candidate:
    if price is not None and (isinstance(price, bool) or not isinstance(price, int | float)):
        raise ValueError(f"{where}.price must be a number")
    server: dict[str, Any] = to_json_value(base.replica)
    routing: dict[str, Any] = to_json_value(base.routing)
    for key, value in values.items():
        place = f"{where}.{key}"
        if key in _REJECTED:
            raise ValueError(f"{place} {_REJECTED[key]}")
        if key == "cost":
            server["cost"] = {**server["cost"], **_object(value, place)}
        elif key in SCHEDULER_KEYS:
            server["scheduler"][key] = value
        elif key in ROUTER_KEYS:
            routing[key] = value
        elif key in SERVER_KEYS:
            server[key] = value
        else:
            known = SCHEDULER_KEYS | ROUTER_KEYS | SERVER_KEYS
            raise ValueError(f"{place} is unknown{did_you_mean(key, known, 'docs/settings.md')}")
    replica = from_json_value(SimulationConfig, server, where)
    router = from_json_value(RoutingConfig, routing, where)
    try:
        return Candidate(name=name, replica=replica, routing=router, price=_as_float(price))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _as_float(price: float | None) -> float | None:
    """Return a price as a float; infinite for an integer that is too large for a float."""
    try:
        return None if price is None else float(price)
    except OverflowError:
        return math.inf


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object")
    return dict(cast("Mapping[str, Any]", value))
