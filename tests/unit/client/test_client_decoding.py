"""Messages of the contract become immutable values of the client."""

import enum
import pickle
from typing import Any

import pytest

import penstock.client
import penstock.v1 as pb
from penstock.client import (
    Accepted,
    EchoedPrompt,
    Finished,
    FinishReason,
    ModelLimits,
    ModelState,
    Progress,
    RequestEnd,
    RequestState,
    StreamBroken,
    Timings,
    TokenRecord,
    Tokens,
    TopLogprob,
    Usage,
    WaitReason,
)
from penstock.client.decoding import decode_event, decode_generation, decode_model
from penstock.server.rpc.mapping_out import duration_of
from support.scripted_server import demo_model, finished_message


def test_accepted() -> None:
    message = pb.RequestAccepted(request_id="r", model="m", num_prompt_tokens=3, seed=2**64 - 1)

    event = decode_event(pb.GenerateResponse(sequence=0, accepted=message))

    assert event == Accepted(
        sequence=0,
        request_id="r",
        model="m",
        num_prompt_tokens=3,
        seed=2**64 - 1,
        estimated_queue_s=None,
    )


def test_progress_distinguishes_next_in_queue_from_not_known() -> None:
    message = pb.RequestProgress(
        state=pb.RequestState.REQUEST_STATE_PENDING,
        queue_position=0,
        wait_reason=pb.WaitReason.WAIT_REASON_BLOCKS,
        queue_duration=duration_of(0.25),
        estimated_queue_duration=duration_of(1.5),
        num_preemptions=1,
    )

    known = decode_event(pb.GenerateResponse(sequence=1, progress=message))
    message.ClearField("queue_position")
    unknown = decode_event(pb.GenerateResponse(sequence=1, progress=message))

    assert known == Progress(
        sequence=1,
        state=RequestState.PENDING,
        queue_position=0,
        wait_reason=WaitReason.BLOCKS,
        num_cached_prompt_tokens=0,
        num_preemptions=1,
        queue_s=0.25,
        estimated_queue_s=1.5,
    )
    assert isinstance(unknown, Progress)
    assert unknown.queue_position is None


def test_records_distinguish_an_unset_logprob_from_zero() -> None:
    message = pb.TokenDelta(output_index=2, text="x", num_tokens=2)
    message.records.add(id=7)
    message.records.add(id=8, logprob=0.0, rank=1, top_logprobs=[pb.TopLogprob(id=8, logprob=-0.5)])

    event = decode_event(pb.GenerateResponse(sequence=5, tokens=message))

    assert event == Tokens(
        sequence=5,
        output_index=2,
        text="x",
        num_tokens=2,
        records=(
            TokenRecord(id=7, logprob=None, rank=None, top_logprobs=()),
            TokenRecord(id=8, logprob=0.0, rank=1, top_logprobs=(TopLogprob(id=8, logprob=-0.5),)),
        ),
    )


def test_finished_with_figures() -> None:
    event = decode_event(pb.GenerateResponse(sequence=9, finished=finished_message(11)))

    assert isinstance(event, Finished)
    assert event.usage == Usage(
        num_prompt_tokens=3, num_completion_tokens=11, num_cached_prompt_tokens=1
    )
    assert event.timings == Timings(
        queue_s=0.002, prefill_s=0.01, ttft_s=0.0125, decode_s=0.5, total_s=0.6
    )
    assert event.outputs[0].finish_reason is FinishReason.LENGTH
    # Ten of the eleven tokens were decoded, in half a second.
    assert event.tokens_per_s == pytest.approx(20.0)


def test_no_first_token_and_no_speed() -> None:
    message = finished_message(1)
    message.timings.ClearField("ttft_duration")

    event = decode_event(pb.GenerateResponse(finished=message))

    assert isinstance(event, Finished)
    assert event.timings.ttft_s is None
    assert event.tokens_per_s is None


@pytest.mark.parametrize("field", ["stop_string", "stop_token_id", None])
def test_matched_stop(field: str | None) -> None:
    end = pb.OutputEnd(finish_reason=pb.FinishReason.FINISH_REASON_STOP)
    if field is not None:
        setattr(end, field, "" if field == "stop_string" else 0)

    event = decode_event(pb.GenerateResponse(finished=pb.RequestFinished(outputs=[end])))

    assert isinstance(event, Finished)
    assert event.outputs[0].stop_string == ("" if field == "stop_string" else None)
    assert event.outputs[0].stop_token_id == (0 if field == "stop_token_id" else None)


def test_enum_values_of_later_releases_are_unknown() -> None:
    message = pb.RequestProgress()
    message.ParseFromString(bytes([0x08, 77, 0x18, 88]))  # state = 77, wait_reason = 88

    event = decode_event(pb.GenerateResponse(progress=message))

    assert isinstance(event, Progress)
    assert event.state is RequestState.UNKNOWN
    assert event.wait_reason is WaitReason.UNKNOWN


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (RequestState, pb.RequestState, "REQUEST_STATE_"),
        (FinishReason, pb.FinishReason, "FINISH_REASON_"),
        (WaitReason, pb.WaitReason, "WAIT_REASON_"),
        (ModelState, pb.ModelState, "MODEL_STATE_"),
    ],
)
def test_enums_are_those_of_the_contract(ours: Any, theirs: Any, prefix: str) -> None:
    contract = {name.removeprefix(prefix): value for name, value in theirs.items()}

    assert {item.name: item.value for item in ours if item.value >= 0} == contract


def test_whole_generation_joins_outputs() -> None:
    response = pb.GenerateOnceResponse(
        accepted=pb.RequestAccepted(request_id="r"),
        outputs=[
            pb.TokenDelta(output_index=1, text="two"),
            pb.TokenDelta(output_index=0, text="one"),
        ],
        prompt=pb.PromptEcho(text="zero"),
        finished=finished_message(1, 2),
    )

    generation = decode_generation(response)

    assert generation.text == "one"
    assert [output.text for output in generation.outputs] == ["one", "two"]
    assert generation.outputs[1].end.num_completion_tokens == 2
    assert generation.accepted.sequence == 0
    assert generation.prompt == EchoedPrompt(text="zero", records=())
    assert type(generation.finished) is RequestEnd, "only messages of a stream are numbered"


@pytest.mark.parametrize("missing", ["accepted", "finished"])
def test_whole_generation_without_a_part_is_broken(missing: Any) -> None:
    response = pb.GenerateOnceResponse(accepted=pb.RequestAccepted(), finished=finished_message(1))
    response.ClearField(missing)

    with pytest.raises(StreamBroken):
        decode_generation(response)


def test_model() -> None:
    model = decode_model(demo_model())

    assert model.name == "demo"
    assert model.state is ModelState.READY
    assert model.limits.max_total_tokens == 512
    assert model.limits.reader_stall_timeout_s == 30.0
    assert model.limits.max_num_outputs is None
    assert model.keepalive.server_ping_interval_s == 20.0
    assert model.supports("logprobs") is True
    assert model.supports("images") is False
    assert model.supports("regex") is None
    assert model.ready_at_s is None


def test_limits_are_those_of_the_contract() -> None:
    durations = {"max_resume_timeout", "reader_stall_timeout", "default_timeout", "max_timeout"}
    contract = {
        f"{field.name}_s" if field.name in durations else field.name
        for field in pb.ModelLimits.DESCRIPTOR.fields
    }

    assert set(ModelLimits.__dataclass_fields__) == contract - {"keepalive"}


@pytest.mark.parametrize(
    "kind",
    [
        value
        for value in vars(penstock.client).values()
        if isinstance(value, type) and issubclass(value, enum.Enum)
    ],
    ids=lambda kind: kind.__name__,
)
def test_enums_are_shown_by_name_and_numbered_as_in_the_contract(kind: type[enum.IntEnum]) -> None:
    for value in kind:
        name = f"{kind.__name__}.{value.name}"
        assert [str(value), repr(value), f"{value}", f"{value:>40}".strip()] == [name] * 4
        assert value == int(value)
        assert pickle.loads(pickle.dumps(value)) is value
