"""Plays one game again: `PYTHONPATH=tests python -m support.game_replay --seed 17 --shrink`.

Owns the command line. A failing game ends with its traceback; `--shrink` first makes it smaller and
prints the trace that is left, for `--trace`.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from support.engine_player import replay
from support.game_draws import DrawnGame
from support.game_shrink import shrunk, symptom

NUM_TURNS = 100


def main() -> None:
    """Play it."""
    parser = argparse.ArgumentParser(description="Play a game against the engine again.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="the seed that a failing test named")
    which.add_argument("--trace", type=Path, help="a file with a trace, as --shrink prints it")
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="turns of a game of a seed")
    parser.add_argument("--shrink", action="store_true", help="make a failing game smaller first")
    arguments = parser.parse_args()
    if arguments.trace is None:
        trace = recorded(arguments.seed, arguments.turns)
    else:
        trace = arguments.trace.read_text(encoding="utf-8")
    if symptom(trace) is None:
        sys.stderr.write("this game does not fail\n")
        return
    if arguments.shrink:
        trace = shrunk(trace)
        sys.stdout.write(f"{trace}\n")
    replay(trace)


def recorded(seed: int, num_turns: int) -> str:
    """The trace of a seed's game, as far as it went if it fails."""
    game = DrawnGame(seed)
    # How it fails is told when the trace is played.
    with suppress(Exception):
        game.play(num_turns)
    return game.player.dumped()


if __name__ == "__main__":
    main()
