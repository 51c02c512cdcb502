"""Defines the candidates that a plan compares, and reads them from JSON.

A candidate is a name with replica settings, router settings and an optional price.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, cast

from penstock.scheduler.setting import check, setting
from penstock.server.observe.recording.trace import check_text
from penstock.server.settings.json_values import to_json_value
from penstock.server.settings.sources import read_object
from penstock.server.settings.table import Declared, declared
from penstock.tools.simulation.routing import RoutingConfig
from penstock.tools.simulation.settings import SimulationConfig

_REJECTED = {
    "order": "is set by policy",
    "targets": "are set for the plan",
    "scheduler": "write its keys directly into the candidate",
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


KEYS: Final = tuple(
    item
    for item in declared(Candidate, has_all=True)
    if item.path != "replica.scheduler.order" and not item.path.startswith("replica.targets.")
)
"""The keys of a candidate besides its name."""


def candidates_from_json(data: object, base: Candidate) -> tuple[Candidate, ...]:
    """Convert `data`, a parsed JSON array of objects, to candidates; omitted fields are taken from
    `base`.

    An object has a `name`, an optional `price`, and settings of SimulationConfig, SchedulerConfig
    and RoutingConfig under their names; `cost` is an object of coefficients. Names must differ, and
    all candidates or none must have a price. Raises ValueError if `data` is invalid; the error
    names the field, except for equal names.
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
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"{where}.name must be a string")
    try:
        return _named(name, values, base, where)
    except ValueError as error:
        # In a long list, a name is easier to find than an index.
        raise ValueError(f"{error} (candidate {name!a})") from None


def _named(name: str, values: Mapping[str, Any], base: Candidate, where: str) -> Candidate:
    for key, reason in _REJECTED.items():
        if key in values:
            raise ValueError(f"{where}.{key} {reason}")
    sources = read_object(tuple(_based(item, base) for item in KEYS), values, f"{where}.")
    derived = {item.path: attrgetter(item.path)(base) for item in KEYS if item.name not in sources}
    derived |= {"name": name, "replica.targets": base.replica.targets}
    return sources.build(Candidate, derived)


def _based(item: Declared, base: Candidate) -> Declared:
    """Return the setting; if it is the cost model, with the coefficients of `base` as defaults."""
    if item.path != "replica.cost":
        return item
    coefficients = to_json_value(base.replica.cost)
    return replace(item, setting=replace(item.setting, needs_all=False, base=coefficients))
