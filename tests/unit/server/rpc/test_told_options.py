"""The options of a request in its record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.front.accounts import Accounts, Outcome
from penstock.server.observe.request_record import RequestOptions, RequestRecord
from penstock.server.rpc.handlers import CallAccounts
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import options_pb2, prompt_pb2
from support.record_log import RecordLog

ALL = pb.GenerateRequest(
    chat_prompt=prompt_pb2.ChatPrompt(),
    sampling=options_pb2.SamplingOptions(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        frequency_penalty=0.1,
        presence_penalty=-0.3,
        seed=7,
        num_outputs=3,
    ),
    stopping=options_pb2.StoppingOptions(max_tokens=64),
    scheduling=options_pb2.SchedulingOptions(priority=-5),
)
ZEROS = pb.GenerateRequest(
    sampling=options_pb2.SamplingOptions(temperature=0.0, top_k=0, seed=0, num_outputs=0),
    stopping=options_pb2.StoppingOptions(max_tokens=0),
)


def told(message: pb.GenerateRequest, *, is_stream: bool = True) -> RequestRecord:
    log = RecordLog()
    accounts = Accounts(log.recorder, is_tracing=False, front_id=1, has_content=False)
    front: Any = SimpleNamespace(accounts=accounts, model="tiny", model_names=("tiny", "alias"))
    calls = CallAccounts(front, "service")
    account = accounts.open("service/Generate", arrival_s=1.0)
    calls.describe(account, message, is_stream=is_stream)
    accounts.close(account, Outcome(3, "INVALID_ARGUMENT"), 2.0, is_engine_up=True)
    (record,) = log.records
    return record


def test_every_option_is_told() -> None:
    assert told(ALL, is_stream=False).options == RequestOptions(
        is_chat=True,
        is_stream=False,
        num_outputs=3,
        max_tokens=64,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        frequency_penalty=0.1,
        presence_penalty=-0.3,
        seed=7,
        priority=-5,
    )


def test_what_was_not_asked_for_is_told_apart_from_zero() -> None:
    assert told(pb.GenerateRequest()).options == RequestOptions()
    asked = RequestOptions(num_outputs=0, max_tokens=0, temperature=0.0, top_k=0, seed=0)
    assert told(ZEROS).options == asked


@pytest.mark.parametrize(("name", "model"), [(None, "tiny"), ("alias", "tiny"), ("canary", "")])
def test_only_a_model_of_ours_is_named(name: str | None, model: str) -> None:
    assert told(pb.GenerateRequest(model=name)).model == model
