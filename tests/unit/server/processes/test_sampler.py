"""Samples of running threads, written as a speedscope file, with a clock that the test sets."""

from __future__ import annotations

import json
import threading

import pytest

from penstock.server.ipc.control_frames import SetLogLevel
from penstock.server.ipc.frames import Command, CommandResult, Profile
from penstock.server.processes.command_runner import CommandRunner, sample


def innermost_wait(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait(60)


def test_samples_contain_the_frames_of_a_thread_and_sum_to_the_duration() -> None:
    begun, end = threading.Event(), threading.Event()
    secret = "canary-in-a-local"
    thread = threading.Thread(target=innermost_wait, args=(begun, end), name="worker")
    thread.start()
    assert begun.wait(60)
    times_s = iter([0.0, 0.4, 0.9, 1.6])
    file = sample("engine", 1.5, wait=lambda s: None, clock=lambda: next(times_s))
    end.set()
    thread.join()

    document = json.loads(file)
    frames = document["shared"]["frames"]
    (worker,) = [one for one in document["profiles"] if one["name"] == "engine: worker"]
    assert worker["endValue"] == pytest.approx(1.6)
    assert sum(worker["weights"]) == pytest.approx(1.6)
    names = [frames[index]["name"] for index in worker["samples"][0]]
    assert "innermost_wait" in names
    assert names.index("innermost_wait") < names.index("Event.wait"), "outermost first"
    # It stood still: equal samples are one.
    assert len(worker["samples"]) == 1
    assert not [one for one in document["profiles"] if one["name"].endswith("MainThread")]
    assert secret not in file.decode()


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0, float("nan"), float("inf")])
def test_the_duration_of_a_profile_is_bounded(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be above 0 and at most 60"):
        sample("engine", seconds)


def test_one_profile_runs_at_a_time_and_invalid_commands_are_rejected() -> None:
    orders = CommandRunner("engine")
    answered = threading.Event()
    answers: list[CommandResult] = []

    def take(answer: CommandResult) -> None:
        answers.append(answer)
        answered.set()

    orders.execute(Command(ticket=1, action=Profile(seconds=0.2)), take)
    second: list[CommandResult] = []
    orders.execute(Command(ticket=2, action=Profile(seconds=0.2)), second.append)
    assert second == [CommandResult(ticket=2, problem="engine is being sampled already")]
    assert answered.wait(60)
    assert json.loads(answers[0].payload)["name"] == "engine"

    bad: list[CommandResult] = []
    orders.execute(Command(ticket=3, action=SetLogLevel(level="loud")), bad.append)
    orders.execute(Command(ticket=4, action=Profile(seconds=0.0)), bad.append)
    assert [answer.ticket for answer in bad] == [3, 4]
    assert "level must be one of debug, info, warning, error, not 'loud'" in bad[0].problem
    assert bad[1].problem
