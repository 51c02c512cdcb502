"""The engine's status board and the fronts' heartbeats. Readers get what was written, and counters
start again with each new writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.server.ipc.board import (
    BoardError,
    BoardView,
    EngineBoard,
    LivenessReader,
    LivenessWriter,
    LoadState,
    QueueState,
    create_board,
    create_heartbeats,
)


@pytest.fixture
def fd() -> Iterator[int]:
    made = create_board(4)
    yield made
    os.close(made)


def keys(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_a_new_board_has_no_running_request(fd: int) -> None:
    view = BoardView(fd)
    assert (view.epoch, view.num_heartbeats) == (0, 0)
    assert view.keys_in_progress() == view.keys_on_probation() == frozenset()
    view.close()
    view.close()


def test_heartbeats_are_counted_and_begin_again_with_every_engine(fd: int) -> None:
    view, first = BoardView(fd), EngineBoard(fd, 1)
    first.heartbeat()
    first.heartbeat()
    assert (view.epoch, view.num_heartbeats) == (1, 2)
    first.close()
    second = EngineBoard(fd, 2)
    assert (view.epoch, view.num_heartbeats) == (2, 0)
    second.close()
    view.close()


def test_the_queue_is_shown_as_it_is(fd: int) -> None:
    view, board = BoardView(fd), EngineBoard(fd, 7)
    assert view.queue == QueueState(
        epoch=7, num_waiting=0, num_waiting_tokens=0, estimated_queue_s=None, at_s=0.0
    )
    board.publish_queue(3, 2**40, 0.25)
    board.heartbeat()
    state = view.queue
    assert (state.num_waiting, state.num_waiting_tokens) == (3, 2**40)
    assert state.estimated_queue_s == 0.25
    assert state.at_s > 0
    board.publish_queue(0, 0, None)
    assert view.queue.estimated_queue_s is None
    board.close()
    view.close()


def test_the_load_is_shown_as_it_is_and_begins_again_with_every_engine(fd: int) -> None:
    view, board = BoardView(fd), EngineBoard(fd, 7)
    board.publish_queue(2, 99, None)
    board.publish_load(5, 40, 2**40)
    board.publish_retention_cuts(3, 2**33)
    board.mark_probation([11])
    assert view.load == LoadState(
        epoch=7,
        num_running=5,
        num_waiting=2,
        num_waiting_tokens=99,
        num_used_blocks=40,
        num_output_tokens=2**40,
        num_shortened_retentions=3,
        num_dropped_blocks=2**33,
    )
    assert view.keys_on_probation() == {11}
    board.close()
    again = EngineBoard(fd, 8)
    assert (view.load.num_running, view.load.num_output_tokens) == (0, 0)
    assert view.load.num_dropped_blocks == 0
    again.close()
    view.close()


def test_the_requests_of_the_last_step_are_known_until_none_continues(fd: int) -> None:
    view, board = BoardView(fd), EngineBoard(fd, 1, num_steps=1)
    board.mark_step(keys(1 << 32 | 1, 1 << 32 | 2))
    assert view.keys_in_progress() == {1 << 32 | 1, 1 << 32 | 2}
    board.mark_step(keys(2**63 - 1))
    assert view.keys_in_progress() == {2**63 - 1}
    board.close()
    assert view.keys_in_progress() == {2**63 - 1}  # of a dead one
    again = EngineBoard(fd, 2)
    assert view.keys_in_progress() == frozenset()
    again.mark_step(keys(5))
    again.clear_step()
    assert view.keys_in_progress() == frozenset()
    again.close()
    view.close()


def test_with_two_steps_under_way_both_count(fd: int) -> None:
    view, board = BoardView(fd), EngineBoard(fd, 1, num_steps=2)
    for step in ((1, 2), (2, 3), (4,)):
        board.mark_step(keys(*step))
    assert view.keys_in_progress() == {2, 3, 4}
    board.close()
    view.close()


def test_keys_beyond_the_capacity_are_dropped(fd: int) -> None:
    view, board = BoardView(fd), EngineBoard(fd, 1)
    board.mark_step(keys(1, 2, 3, 4, 5, 6))
    assert view.keys_in_progress() == {1, 2, 3, 4}
    board.close()
    view.close()


def test_submitting_requests_are_running_and_those_on_probation_are_distinguished(fd: int) -> None:
    view, board = BoardView(fd), EngineBoard(fd, 1)
    board.mark_submitting(9)
    assert view.keys_in_progress() == {9}
    board.mark_submitting(0)
    board.mark_probation((4, 5))
    assert view.keys_in_progress() == frozenset()
    assert view.keys_on_probation() == {4, 5}
    board.mark_probation(())
    assert view.keys_on_probation() == frozenset()
    board.close()
    view.close()


def test_invalid_boards_are_rejected() -> None:
    fd = create_heartbeats(8)
    with pytest.raises(BoardError):
        BoardView(fd)
    with pytest.raises(BoardError):
        LivenessWriter(fd, 8, 1)
    os.ftruncate(fd, 3)
    with pytest.raises(BoardError):
        LivenessReader(fd)
    os.close(fd)


def test_every_front_writes_its_heartbeat_in_its_row() -> None:
    fd = create_heartbeats(2)
    view, one, two = LivenessReader(fd), LivenessWriter(fd, 0, 7), LivenessWriter(fd, 1, 8)
    one.heartbeat()
    one.heartbeat()
    two.heartbeat()
    assert (view.num_heartbeats(0, 7), view.num_heartbeats(1, 8)) == (2, 1)
    # The previous owner of a row is not mistaken for the current one.
    assert view.num_heartbeats(0, 6) == 0
    for closing in (view, one, two):
        closing.close()
    os.close(fd)
