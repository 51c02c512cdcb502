"""Makes a failing game smaller while it fails in the same way.

Owns the search: delta debugging over the actions of a trace (Zeller and Hildebrandt, "Simplifying
and Isolating Failure-Inducing Input", 2002), and shorter runs of turns. Does not know the game.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

from support.engine_player import replay

Action: TypeAlias = list[Any]
MAX_REPLAYS = 4000


def symptom(trace: str) -> str | None:
    """Where and how the game of a trace fails; None when it does not."""
    try:
        replay(trace)
    # Whatever goes wrong in a game is its symptom.
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {place.name}: {place.line}"
    return None


def shrunk(trace: str) -> str:
    """The smallest trace found that fails as `trace` does. ValueError when that does not fail."""
    wanted = symptom(trace)
    if wanted is None:
        raise ValueError("trace must be one of a game that fails")
    setup, *actions = json.loads(trace)
    num_replays = 0

    def fails(candidate: list[Action]) -> bool:
        nonlocal num_replays
        num_replays += 1
        is_left = num_replays <= MAX_REPLAYS
        return is_left and symptom(json.dumps([setup, *candidate])) == wanted

    while True:
        smaller = _with_fewer_turns(_without_some(actions, fails), fails)
        if len(json.dumps(smaller)) >= len(json.dumps(actions)):
            return json.dumps([setup, *smaller])
        actions = smaller


def _without_some(actions: list[Action], fails: Callable[[list[Action]], bool]) -> list[Action]:
    size = max(len(actions) // 2, 1)
    while True:
        start = 0
        while start < len(actions):
            candidate = actions[:start] + actions[start + size :]
            if fails(candidate):
                actions = candidate
            else:
                start += size
        if size == 1:
            return actions
        size //= 2


def _with_fewer_turns(actions: list[Action], fails: Callable[[list[Action]], bool]) -> list[Action]:
    for index, (name, arguments) in enumerate(actions):
        for count in (1, arguments["count"] // 2) if name == "step" else ():
            candidate = [*actions[:index], [name, {"count": count}], *actions[index + 1 :]]
            if 0 < count < arguments["count"] and fails(candidate):
                actions = candidate
                break
    return actions
