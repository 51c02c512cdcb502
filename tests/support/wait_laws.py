"""What engines state of how requests waited and ran, against what could be seen from outside.

Owns a separate account: which was let in past whom by the order of the news, and who was in which
launched batch. That each second is put down to the right reason is shown by test_wait_clock.py.
"""

from __future__ import annotations

from penstock.scheduler.config import SchedulingOrder
from penstock.scheduler.events import Admitted, Failed, Finished, Preempted, Stay, StepEvents, Wait
from support.game_records import Game, Told

TOLERANCE_S = 1e-6


def check_waits(game: Game, events: StepEvents, num_launched_before: int) -> None:
    """Every stay of this turn's news; to be asked before they are taken.

    `num_launched_before`: batches that were launched before this turn.
    """
    running = {key for key, told in game.live.items() if told.is_running}
    least = {key: told.num_passed_by for key, told in game.live.items()}
    for change in events.changes:
        told = game.told[change.key]
        if isinstance(change, Admitted):
            assert change.wait is not None
            assert change.wait.num_passed_by == told.num_passed_by
            _check_wait(game, told, change.wait, change.at_s)
            running.add(change.key)
            told.first_launch = num_launched_before
            for other in game.live.values():
                other.num_passed_by += (
                    other.spec.key not in running and other.sequence < told.sequence
                )
        elif isinstance(change, Preempted):
            assert change.stay is not None
            running.discard(change.key)
            _check_stay(game, told, change.stay, num_launched_before)
            told.waits_since_s, told.num_passed_by = change.at_s, 0
            least[change.key] = 0
    for end in events.ends:
        told = game.told[end.key]
        is_refused = isinstance(end, Failed) and not told.num_queued and _is_new(told, events)
        _check_end(game, told, end, is_running=end.key in running, is_refused=is_refused)
        if end.wait is not None:
            # When in this turn it ended is not reported.
            assert least[end.key] <= end.wait.num_passed_by <= told.num_passed_by


def _is_new(told: Told, events: StepEvents) -> bool:
    """Nothing was stated of the whole request before or in this turn."""
    first_key = told.spec.leader_key or told.spec.key
    return told.is_refusable and all(change.key != first_key for change in events.changes)


def _check_end(
    game: Game, told: Told, end: Finished | Failed, *, is_running: bool, is_refused: bool
) -> None:
    assert (end.stay is not None) is is_running
    assert (end.wait is not None) is not (is_running or is_refused)
    if end.wait is not None:
        _check_wait(game, told, end.wait, end.at_s)
    if end.stay is not None:
        _check_stay(game, told, end.stay, len(game.executor.rows))


def _check_wait(game: Game, told: Told, wait: Wait, at_s: float) -> None:
    """The parts are none below zero, and together the stay."""
    parts = (wait.blocks_s, wait.slots_s, wait.token_budget_s, wait.fairness_s, wait.other_s)
    assert min(parts) >= 0.0
    assert abs(sum(parts) - (at_s - told.waits_since_s)) <= TOLERANCE_S
    assert game.config.order is SchedulingOrder.FAIR or not wait.fairness_s


def _check_stay(game: Game, told: Told, stay: Stay, num_launched: int) -> None:
    """Steps, chunks and sizes are those of the batches that it was in."""
    key, batches = told.spec.key, game.executor.rows[:num_launched]
    own = [at for at in range(told.first_launch, len(batches)) if key in batches[at].ends]
    assert stay.num_steps == len(own)
    num_chunks, furthest = 0, 0
    for batch in (batches[at] for at in own):
        # Who was not answered is asked again: nothing new is computed.
        num_chunks += key in batch.prefilled and batch.ends[key] > furthest
        furthest = max(furthest, batch.ends[key])
    assert stay.num_chunks == num_chunks
    # A prompt may have stood in its slot without tokens in the end, for so long as was not
    # reported.
    lasts = range(own[-1], len(batches)) if own else (0,)
    told_sizes = (stay.min_batch_size, stay.max_batch_size)
    assert told_sizes in {_sizes(game, own, last) for last in lasts}


def _sizes(game: Game, own: list[int], last: int) -> tuple[int, int]:
    """Least and greatest of the batches with rows from the first of `own` to `last`."""
    batches = game.executor.rows[own[0] : last + 1] if own else []
    sizes = [len(batch.ends) for batch in batches if batch.ends]
    return min(sizes, default=0), max(sizes, default=0)
