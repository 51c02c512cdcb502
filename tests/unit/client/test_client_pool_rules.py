"""How the client's pool selects channels, avoids failed ones, and limits open and waiting calls;
which addresses and service configs are valid, and how they set up channels.
"""

import json
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import (
    NO_RETRY,
    BacklogFull,
    ChannelConfig,
    Client,
    PenstockError,
    PoolConfig,
    ResourceExhausted,
    RetryPolicy,
    SyncClient,
    retry_service_config,
)
from penstock.client.channel import grpc_targets
from penstock.client.errors import Failure, error_of
from penstock.client.local_errors import client_closed, deadline_passed
from penstock.client.pool import Admission, ChannelPicker, is_unanswered
from penstock.client.retry import is_transient
from penstock.client.service_config import check_service_config, default_service_config


def reported_deadline() -> PenstockError:
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return error_of(Failure(code=code, message="", reason="DEADLINE_EXCEEDED"))


def test_equal_channels_take_turns() -> None:
    picker = ChannelPicker(3)

    assert [picker.pick(0.0) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_channel_with_the_fewest_open_calls_is_selected() -> None:
    picker = ChannelPicker(3)
    for _ in range(6):
        picker.pick(0.0)
    picker.release(1, is_unavailable=False, now_s=0.0)

    assert picker.pick(0.0) == 1


def test_a_channel_without_an_answer_is_passed_over_for_longer_each_time() -> None:
    picker = ChannelPicker(2)
    now_s = 0.0
    waits_s: list[float] = []
    for _ in range(8):
        taken = [picker.pick(now_s), picker.pick(now_s)]
        assert sorted(taken) == [0, 1]
        picker.release(0, is_unavailable=True, now_s=now_s)
        picker.release(1, is_unavailable=False, now_s=now_s)
        began_s = now_s
        while (index := picker.pick(now_s)) != 0:
            picker.release(index, is_unavailable=False, now_s=now_s)
            now_s += 0.5
        picker.release(0, is_unavailable=True, now_s=began_s)
        waits_s.append(now_s - began_s)

    assert waits_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_one_success_resets_the_failures_of_a_channel() -> None:
    picker = ChannelPicker(2)
    taken = [picker.pick(0.0) for _ in range(4)]
    assert taken == [0, 1, 0, 1]

    picker.release(0, is_unavailable=True, now_s=0.0)
    assert picker.pick(0.5) == 1
    picker.release(0, is_unavailable=False, now_s=0.5)

    assert picker.pick(0.5) == 0


def test_one_call_at_a_time_tries_a_channel_that_failed() -> None:
    picker = ChannelPicker(2)
    assert [picker.pick(0.0) for _ in range(4)] == [0, 1, 0, 1]
    picker.release(0, is_unavailable=True, now_s=0.0)
    picker.release(0, is_unavailable=True, now_s=0.0)

    later = [picker.pick(2.0) for _ in range(4)]

    assert later.count(0) == 1
    picker.note_response(0)
    assert [picker.pick(2.0) for _ in range(3)] == [0, 0, 0]


def test_when_all_fail_calls_are_spread() -> None:
    picker = ChannelPicker(2)
    for index in range(2):
        assert picker.pick(0.0) == index
        picker.release(index, is_unavailable=True, now_s=0.0)

    assert sorted(picker.pick(0.5) for _ in range(4)) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("error", "request_id", "expected"),
    [
        (deadline_passed(), "", True),
        (deadline_passed("r-1"), "r-1", False),
        (reported_deadline(), "", False),
        (client_closed(), "", False),
    ],
)
def test_only_a_deadline_without_any_response_counts_as_unanswered(
    error: PenstockError, request_id: str, expected: bool
) -> None:
    assert is_unanswered(error, request_id) is expected


def test_when_all_fail_the_one_that_is_due_first_is_tried() -> None:
    picker = ChannelPicker(2)
    for index, now_s in ((0, 0.0), (1, 0.5)):
        assert picker.pick(now_s) == index
        picker.release(index, is_unavailable=True, now_s=now_s)

    assert picker.pick(0.6) == 0


def test_a_single_channel_is_always_taken() -> None:
    picker = ChannelPicker(1)
    picker.pick(0.0)
    picker.release(0, is_unavailable=True, now_s=0.0)

    assert picker.pick(0.0) == 0


def test_the_backlog_is_bounded_and_served_in_order() -> None:
    admission: Admission[str] = Admission(PoolConfig(max_concurrent_calls=1, max_waiting_calls=2))
    assert admission.try_admit()
    assert not admission.try_admit()
    admission.enqueue("a")
    admission.enqueue("b")

    with pytest.raises(BacklogFull, match="1 calls of this client are open and 2 wait") as caught:
        admission.enqueue("c")

    assert isinstance(caught.value, ResourceExhausted)
    assert not is_transient(caught.value)
    assert [admission.release(), admission.release(), admission.release()] == ["a", "b", None]
    assert admission.num_open == 0


def test_no_request_overtakes_a_waiting_one() -> None:
    admission: Admission[str] = Admission(PoolConfig(max_concurrent_calls=2))
    assert admission.try_admit()
    assert admission.try_admit()
    admission.enqueue("a")
    assert admission.release() == "a"
    assert admission.release() is None

    admission.enqueue("b")

    assert not admission.try_admit()


@given(
    limit=st.integers(1, 3),
    max_waiting=st.integers(0, 3),
    moves=st.lists(st.sampled_from(["enter", "leave", "give up"]), max_size=40),
)
def test_the_number_of_admitted_calls_stays_within_the_limit(
    limit: int, max_waiting: int, moves: list[str]
) -> None:
    config = PoolConfig(max_concurrent_calls=limit, max_waiting_calls=max_waiting)
    admission: Admission[int] = Admission(config)
    waiting: list[int] = []
    num_inside = 0
    for number, move in enumerate(moves):
        if move == "enter":
            if admission.try_admit():
                num_inside += 1
                assert not waiting
            elif len(waiting) < max_waiting:
                admission.enqueue(number)
                waiting.append(number)
            else:
                with pytest.raises(BacklogFull):
                    admission.enqueue(number)
        elif move == "leave" and num_inside:
            woken = admission.release()
            assert woken == (waiting.pop(0) if waiting else None)
            num_inside -= woken is None
        elif move == "give up" and waiting:
            assert admission.try_remove(waiting.pop())
        assert admission.num_open == num_inside <= limit
        assert admission.num_waiting == len(waiting)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_channels", 0), ("max_concurrent_calls", 0), ("max_waiting_calls", -1)],
)
def test_bad_pool_settings_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}:"):
        PoolConfig(**{field: value})


@pytest.mark.parametrize(
    ("address", "targets"),
    [
        ("a", ("a:50051",)),
        ("a:1,b:2", ("a:1", "b:2")),
        ("a, [::1]:3", ("a:50051", "[::1]:3")),
        (["a:1", "dns:///b:2"], ("a:1", "dns:///b:2")),
        ("dns:///a:1,dns:///b:2", ("dns:///a:1", "dns:///b:2")),
        ("ipv4:127.0.0.1:1,127.0.0.2:2", ("ipv4:127.0.0.1:1,127.0.0.2:2",)),
        ("unix:/tmp/a,b", ("unix:/tmp/a,b",)),
    ],
)
def test_several_addresses(address: Any, targets: tuple[str, ...]) -> None:
    assert grpc_targets(address) == targets


@pytest.mark.parametrize(
    ("address", "message"),
    [((), "must not be empty"), ("a:1,a:1", "named twice"), ("a:1,", "must be HOST")],
)
@pytest.mark.parametrize("kind", [Client, SyncClient])
def test_bad_lists_of_addresses(kind: Any, address: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^address: .*{message}"):
        kind(address)


@pytest.mark.parametrize(
    ("target", "is_spread"),
    [
        ("dns:///a:1", True),
        ("dns:a:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:2", True),
        ("ipv6:[::1]:1", True),
        ("localhost:50051", False),
        ("unix:/tmp/a", False),
        ("xds:///a", False),
    ],
)
def test_round_robin_is_used_for_targets_of_several_servers(target: str, is_spread: bool) -> None:
    config = default_service_config(target)
    options = dict(ChannelConfig().options(target))

    assert (config is not None) == is_spread
    assert options.get("grpc.service_config") == config
    if config is not None:
        assert json.loads(config) == {"loadBalancingConfig": [{"round_robin": {}}]}


def test_a_service_config_of_the_caller_is_used() -> None:
    config = json.dumps({"loadBalancingConfig": [{"pick_first": {}}]})

    options = dict(ChannelConfig(service_config=config).options("dns:///a:1"))

    assert options["grpc.service_config"] == config


def test_every_channel_has_its_own_connection() -> None:
    assert dict(ChannelConfig().options("a:1"))["grpc.use_local_subchannel_pool"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"methodConfig": {}}', "must be a list"),
        ('{"methodConfig": [1]}', "must be an object"),
        ('{"methodConfig": [{"retryPolicy": {}}]}', "would multiply"),
    ],
)
@pytest.mark.parametrize("kind", [Client, SyncClient])
def test_bad_service_configs(kind: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^service_config: .*{message}"):
        kind(channel=ChannelConfig(service_config=text))


def test_grpc_may_retry_where_we_do_not() -> None:
    text = retry_service_config(RetryPolicy(max_attempts=9, initial_backoff_s=0.25))

    check_service_config(text, NO_RETRY)
    with pytest.raises(ValueError, match="would multiply"):
        check_service_config(text, RetryPolicy())
    policy = json.loads(text)["methodConfig"][0]["retryPolicy"]
    assert policy["maxAttempts"] == 5
    assert policy["initialBackoff"] == "0.250s"
    assert policy["retryableStatusCodes"] == ["UNAVAILABLE"]
    with pytest.raises(ValueError, match=r"^max_attempts:"):
        retry_service_config(NO_RETRY)


@pytest.mark.parametrize("value", [0.5, 0.0])
def test_idle_time_out_is_at_least_a_second(value: float) -> None:
    with pytest.raises(ValueError, match=r"^idle_timeout_s:"):
        ChannelConfig(idle_timeout_s=value)
