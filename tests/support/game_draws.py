"""Generates games for the engine: its configuration and the actions of its clients.

Contains the probabilities. Accepts any `random.Random`: a seeded one, so that a seed is a whole
game, or one of hypothesis, so that a failing game can be shrunk.
"""

from __future__ import annotations

from random import Random
from typing import Any

from penstock.executor.fault import Fault, FaultKind
from penstock.scheduler.config import AdmissionPolicy, EvictionPolicy, SchedulingOrder
from penstock.scheduler.request import NO_TIME, FinishReason
from support.engine_player import VOCAB, EnginePlayer

# Prompts are prefixes of these and a tail, so that many share blocks.
STEMS = ((10, 11, 12, 13, 14, 15, 16, 17, 18, 19), (10, 11, 12, 13, 20, 21, 22, 23, 24, 25))


class DrawnGame:
    """The game of a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.player = EnginePlayer(**draw_setup(self._random))
        self._arrivals_per_turn = self._random.choice([0.1, 0.2, 0.5])

    def play(self, num_turns: int) -> None:
        """Run `num_turns` turns with actions between them, then run to the end."""
        while self.player.num_turns < num_turns:
            draw_action(self._random, self.player, self._arrivals_per_turn)
        self.player.finish()


def draw_setup(random: Random) -> dict[str, Any]:
    depth = random.choice([1, 2])
    order = random.choice([SchedulingOrder.FAIR, SchedulingOrder.FAIR, SchedulingOrder.FCFS])
    num_slots = random.choice([2, 4, 4, 6])
    prices = draw_prices(random)
    return {
        "depth": depth,
        "faults": draw_faults(random, depth),
        "block_size": random.choice([1, 2, 4]),
        "pool_tokens": random.randint(16, 48),
        "num_slots": num_slots,
        "budget": random.randint(num_slots, 24),
        "policy": random.choice(list(AdmissionPolicy)),
        "watermark": random.choice([0.0, 0.1, 0.3]),
        "order": order,
        "prices": prices,
        "known_cost": draw_known_cost(random, prices),
        "settings": draw_settings(random, order),
    }


def draw_prices(random: Random) -> list[float]:
    """Return the prices of a device step: one second per step, or a mix of all four."""
    if random.random() < 0.4:
        return [1.0, 0.0, 0.0, 0.0]
    return [
        random.choice([0.1, 0.5, 1.0]),
        random.choice([0.0, 0.02, 0.1]),
        random.choice([0.0, 0.05]),
        random.choice([0.0, 0.003]),
    ]


def draw_known_cost(random: Random, prices: list[float]) -> list[float] | None:
    """Return the prices that the engine is given: none, the true ones, or another device's."""
    factor = random.choice([None, 1.0, 1.0, 2.0, 10.0, 0.1])
    if factor is None or factor == 1.0:
        return None if factor is None else prices
    return [factor * price for price in prices]


def draw_settings(random: Random, order: SchedulingOrder) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "deadline_admission": random.random() < 0.7,
        "min_deadline_chance": random.choice([0.0, 0.1, 0.5]),
        "target_itl_s": random.choice([None, None, 0.3, 1.5, 4.0]),
        "max_num_waiting_tokens": random.choice([10_000, 10_000, 60]),
        "max_num_waiting_per_tenant": random.choice([None, None, 4]),
        "eviction": random.choice(list(EvictionPolicy)),
        "session_ttl_s": random.choice([2.0, 300.0]),
        "max_session_share": random.choice([0.2, 0.5, 1.0]),
        "max_tenant_session_share": random.choice([0.1, 0.25, 1.0]),
        "max_session_tokens": random.choice([8, 1000]),
        "max_retention_share": random.choice([0.1, 0.5, 1.0]),
        "max_tenant_retention_share": random.choice([0.05, 0.25, 1.0]),
    }
    if order is SchedulingOrder.FAIR:
        settings |= {
            "aging_s": random.choice([3.0, 20.0, NO_TIME]),
            "aging_stride": random.choice([1, 3, 8]),
            "max_lookahead": random.choice([0, 2, 16]),
            "max_num_overtakes": random.choice([0, 2, 32]),
            "max_overtake_s": random.choice([1.0, 1e6]),
            "max_prefill_share": random.choice([0.5, 1.0]),
            "tenant_burst_tokens": random.choice([0.0, 30.0, 1e6]),
            "yield_ratio": random.choice([1.5, 2.0, NO_TIME]),
            "tenant_weights": random.choice([{}, {"a": 3.0, "b": 0.5}]),
            "max_num_running_per_tenant": random.choice([None, None, 1, 2]),
        }
    return settings


def draw_faults(random: Random, depth: int) -> list[Fault]:
    """Return faults of single requests: by step, output or request."""
    kinds = [FaultKind.REQUEST_FAILS]
    if depth == 1:
        kinds += [FaultKind.NO_TOKENS, FaultKind.EXTRA_TOKENS]
    return [
        Fault(
            kind=random.choice(kinds),
            at_step=random.randint(1, 90),
            at_output=random.choice([None, random.randint(0, 4)]),
            at_request=random.choice([None, random.randint(1, 20)]),
            max_times=random.randint(1, 3),
            num_extra=random.randint(1, 3),
        )
        for _ in range(random.randint(0, 4))
    ]


def draw_action(random: Random, player: EnginePlayer, arrivals_per_turn: float) -> None:
    """Run an action of a client, or a turn of the engine."""
    if random.random() < arrivals_per_turn / (1.0 + arrivals_per_turn):
        player.submit(**draw_request(random))
        return
    chance = random.random()
    keys = list(player.game.live)
    if chance < 0.05 and keys:
        reason = random.choice([None, *FinishReason])
        key = random.choice(keys)
        player.cancel(key=key, reason=None if reason is None else int(reason))
    elif chance < 0.06 and keys:
        player.submit_again(key=random.choice(keys))
    elif chance < 0.10:
        player.pass_time(seconds=random.choice([0.5, 1.0, 2.0, 5.0]))
    elif player.game.engine.has_work:
        player.step(count=1)
    elif chance < 0.3:
        # Long enough for what was learnt to be old.
        player.pass_time(seconds=random.choice([1.5, 10.0, 600.0]))
    else:
        player.submit(**draw_request(random))


def draw_request(random: Random) -> dict[str, Any]:
    tail = [random.randrange(5, VOCAB) for _ in range(random.randint(1, 6))]
    return {
        "prompt_ids": [*random.choice(STEMS)[: random.choice([0, 5, 8, 10])], *tail],
        "max_tokens": random.randint(1, random.choice([*[8, 16] * 12, 40])),
        "min_tokens": random.randint(0, 3),
        "num_outputs": random.choice([1, 1, 1, 2, 3]),
        "salt": random.choice(["one", "one", "", "two"]),
        "priority": random.randint(-1, 1),
        "tenant": random.choice(["", "a", "b"]),
        "patience_s": draw_patience_s(random),
        "num_replayed": random.choice([0, 0, 0, 1, 2, 3]),
        "has_stops": random.random() < 0.5,
        "has_form": random.random() < 0.05,
        "session": random.choice(["", "", "one", "two"]),
        "retention": random.choice([None, None, None, [10, NO_TIME], [90, 3.0]]),
        "is_key_reused": random.random() < 0.1,
    }


def draw_patience_s(random: Random) -> list[float]:
    """Return three durations from arrival to a deadline or time limit, mostly NO_TIME."""
    if random.random() < 0.6:
        return [NO_TIME] * 3
    return [random.choice([NO_TIME, NO_TIME, 1.0, 3.0, 10.0, 30.0]) for _ in range(3)]
