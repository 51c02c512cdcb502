"""Measures the delay of a request that arrives during the integrity check of an idle engine, for
several sizes of the KV cache.

Uses the scheduler with an executor that takes no time, and a cache filled with prefixes of 100,000
tokens. The engine's loop checks one part ("piece") of the cache at a time, so a request waits for
at most the longest one. The column "at once" is the same check without interruption.

    python benchmarks/integrity_check.py [--full] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from typing import Any

import numpy as np

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import EvictionPolicy, SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import RequestSpec
from report import Outcome, arguments, at_most, print_rows, run

BLOCK_SIZE = 16
NUM_PROMPT = 100_000
SALT = b"benchmark"
GOAL_MS = 1.0


def idle_engine(num_blocks: int, eviction: EvictionPolicy) -> Engine:
    """Return an engine that has no requests, and a pool full of cached blocks."""
    executor = SimulatedExecutor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_seq_len=131_072,
        )
    )
    config = SchedulerConfig(max_num_batched_tokens=131_072, eviction=eviction)
    engine = Engine(executor, config, time.monotonic)
    random = np.random.default_rng(0)
    for key in range(1, num_blocks * BLOCK_SIZE // NUM_PROMPT + 2):
        prompt = random.integers(3, 30_000, NUM_PROMPT).astype(np.int32)
        digests = hash_blocks(prompt, BLOCK_SIZE, chain_root(SALT))
        spec = RequestSpec(
            key=key,
            request_id=str(key),
            prompt_ids=prompt,
            max_tokens=1,
            hash_salt=SALT,
            block_hashes=digests,
        )
        engine.submit((spec,))
        while engine.has_work:
            engine.step()
    return engine


def piece_times_ms(engine: Engine) -> list[float]:
    """Return the duration of each piece of one check, ms."""
    took_ms: list[float] = []
    is_done = False
    while not is_done:
        begun_s = time.perf_counter()
        is_done = engine.check_next_piece()
        took_ms.append((time.perf_counter() - begun_s) * 1e3)
    return took_ms


def measured(num_blocks: int, eviction: EvictionPolicy, rounds: int) -> dict[str, Any]:
    """Return a row: cache size, eviction order, duration of an uninterrupted check, number of
    pieces, median and longest piece.

    The time of a piece is its median over the rounds, to exclude delays by other programs.
    """
    engine = idle_engine(num_blocks, eviction)
    begun_s = time.perf_counter()
    engine.check_integrity()
    at_once_ms = (time.perf_counter() - begun_s) * 1e3
    runs = [piece_times_ms(engine) for _ in range(rounds)]
    pieces_ms = [statistics.median(same) for same in zip(*runs, strict=True)]
    return {
        "blocks": num_blocks,
        "eviction": eviction.name.lower(),
        "at once ms": at_once_ms,
        "pieces": len(pieces_ms),
        "median piece ms": statistics.median(pieces_ms),
        "longest piece ms": max(pieces_ms),
    }


def measure(options: Namespace) -> Outcome:
    """Check caches of several sizes, with each eviction order."""
    rounds = 15 if options.full else 5
    sizes = (4096, 65_536, 262_144, *((1_048_576,) if options.full else ()))
    rows = [measured(size, eviction, rounds) for size in sizes for eviction in EvictionPolicy]
    print_rows("The check of an idle engine", rows)
    return rows, [
        at_most(
            f"longest stop, {row['blocks']} blocks, {row['eviction']}",
            row["longest piece ms"],
            *(GOAL_MS, "ms"),
        )
        for row in rows
    ]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
