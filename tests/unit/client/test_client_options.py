"""Keyword arguments become option groups and a request message; no value is dropped or guessed."""

import math
import re
from dataclasses import fields
from typing import Any, cast

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

import penstock.v1 as pb
from penstock.client import (
    Adapter,
    CacheOptions,
    ChatMessage,
    ChatPrompt,
    ChoiceConstraint,
    Client,
    Constraint,
    GenerationOptions,
    GenerationRequest,
    GrammarConstraint,
    Image,
    JsonSchemaConstraint,
    OutputOptions,
    RegexConstraint,
    ResumePoint,
    SamplingOptions,
    SchedulingOptions,
    StoppingOptions,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from penstock.client.encoding import encode_request
from penstock.client.options import build_request

EVERYTHING: dict[str, Any] = {
    "model": "demo",
    "request_id": "r-1",
    "constraint": RegexConstraint(pattern="a+"),
    "adapter": Adapter(name="lora", scale=0.5),
    "resume_timeout_s": 2.5,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 0.5,
    "logit_bias": {5: -1.0},
    "seed": 2**64 - 1,
    "n": 2,
    "max_tokens": 10,
    "min_tokens": 1,
    "stop": ["x", "y"],
    "stop_token_ids": [4],
    "ignore_eos": True,
    "include_stop_string": True,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "echo": True,
    "min_chunk_tokens": 4,
    "max_chunk_delay_s": 0.5,
    "priority": -3,
    "ttft_timeout_s": 1.5,
    "total_timeout_s": 20.0,
    "time_limit_s": 0.25,
    "cache_salt": "salt",
    "session_id": "s",
    "retention_level": 90,
    "retention_s": 60.0,
}


def encode(prompt: Any = "hi", **options: Any) -> pb.GenerateRequest:
    return encode_request(build_request(prompt, cast(GenerationOptions, options)))


def is_ours(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.file.package == "penstock.v1"


def set_paths(message: Any, prefix: str = "") -> set[str]:
    """Return the paths of all set fields. A field whose type is a message of the contract is
    replaced by the set fields in that message.
    """
    paths: set[str] = set()
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        for inner in value if field.is_repeated and is_ours(field) else [value]:
            paths |= set_paths(inner, f"{path}.") if is_ours(field) else {path}
    return paths


def all_paths(descriptor: Descriptor | None, prefix: str = "") -> set[str]:
    assert descriptor is not None
    paths: set[str] = set()
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        paths |= all_paths(field.message_type, f"{path}.") if is_ours(field) else {path}
    return paths


def test_keywords_are_exactly_the_fields_of_the_groups() -> None:
    groups = (SamplingOptions, StoppingOptions, OutputOptions, SchedulingOptions, CacheOptions)
    of_groups = {option.name for group in groups for option in fields(group)}
    of_request = {option.name for option in fields(GenerationRequest)} - {
        *("prompt", "sampling", "stopping", "output", "scheduling", "cache")
    }

    assert set(GenerationOptions.__annotations__) == of_groups | of_request
    assert set(EVERYTHING) == set(GenerationOptions.__annotations__)


def test_every_field_of_the_contract_can_be_sent() -> None:
    prompts: list[Any] = [
        TextPrompt(text="t", add_special_tokens=False),
        TokenPrompt(ids=(1,)),
        ChatPrompt(
            messages=(
                ChatMessage("user", ("c", Image(data=b"i", mime_type="image/png"))),
                ChatMessage("tool", "9", name="add", tool_call_id="1"),
                ChatMessage("assistant", tool_calls=(ToolCall("add", {"a": 1}, id="1"),)),
            ),
            add_generation_prompt=False,
            window_tokens=9,
            tools=({"type": "function"},),
            template_arguments={"enable_thinking": False},
        ),
    ]
    constraints: list[Constraint] = [
        JsonSchemaConstraint(schema="{}"),
        RegexConstraint(pattern="a"),
        GrammarConstraint(ebnf="root ::= 'a'"),
        ChoiceConstraint(choices=("a",)),
    ]
    messages = [encode(prompt, **EVERYTHING) for prompt in prompts]
    messages += [encode("t", constraint=constraint) for constraint in constraints]

    expected = {path for message in messages for path in set_paths(message)}

    assert expected == all_paths(pb.GenerateRequest.DESCRIPTOR)


def test_values_arrive_in_their_fields() -> None:
    message = encode("hi", **EVERYTHING)

    assert message.text_prompt.text == "hi"
    assert not message.text_prompt.HasField("add_special_tokens")
    assert message.sampling.seed == 2**64 - 1
    assert [(e.token_id, e.bias) for e in message.sampling.logit_bias] == [(5, -1.0)]
    assert list(message.stopping.stop_strings) == ["x", "y"]
    assert message.output.max_chunk_delay.ToMilliseconds() == 500
    assert message.scheduling.ttft_timeout.ToMilliseconds() == 1500
    assert message.scheduling.priority == -3
    assert message.cache.salt == "salt"
    assert message.cache.retention.duration.ToSeconds() == 60
    assert message.resume_timeout.ToMilliseconds() == 2500
    assert message.adapter.scale == 0.5


def test_unspecified_options_are_not_set() -> None:
    assert encode("hi") == pb.GenerateRequest(text_prompt=pb.TextPrompt(text="hi"))


def test_zero_is_not_unset() -> None:
    message = encode("hi", temperature=0.0, seed=0, logprobs=0, priority=0)

    assert message.sampling.HasField("temperature")
    assert message.sampling.HasField("seed")
    assert message.output.HasField("logprobs")
    assert message.scheduling.HasField("priority")


def test_a_single_stop_string_is_not_split_into_letters() -> None:
    assert list(encode("hi", stop="end").stopping.stop_strings) == ["end"]


@pytest.mark.parametrize(
    ("prompt", "arm"),
    [
        ("text", "text_prompt"),
        ([1, 2], "token_prompt"),
        ([ChatMessage("user", "hi")], "chat_prompt"),
    ],
)
def test_prompts_by_their_type(prompt: Any, arm: str) -> None:
    assert encode(prompt).WhichOneof("prompt") == arm


def test_an_empty_text_is_sent_for_the_server_to_judge() -> None:
    assert encode("").WhichOneof("prompt") == "text_prompt"


@pytest.mark.parametrize("prompt", [[1, "a"], [True], [1.5], [ChatMessage("user", "x"), 1]])
def test_mixed_prompts_are_rejected(prompt: Any) -> None:
    with pytest.raises(TypeError, match=r"^prompt:"):
        encode(prompt)


def test_an_empty_sequence_is_no_prompt() -> None:
    with pytest.raises(ValueError, match=r"^prompt:"):
        encode([])


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": "hot"}, "temperature"),
        ({"logit_bias": {-1: 0.0}}, r"logit_bias\[0\].token_id"),
        ({"stop": ["a", 7]}, r"stop\[1\]"),
        ({"n": "x"}, "n"),
        ({"max_chunk_delay_s": math.nan}, "max_chunk_delay_s"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"retention_level": "x"}, "retention_level"),
        ({"retention_s": math.nan}, "retention_s"),
        ({"stop_token_ids": [2**32]}, r"stop_token_ids\[0\]"),
        ({"ttft_timeout_s": math.nan}, "ttft_timeout_s"),
        ({"time_limit_s": math.inf}, "time_limit_s"),
        ({"total_timeout_s": 1e30}, "total_timeout_s"),
        ({"priority": 2**31}, "priority"),
        ({"request_id": 7}, "request_id"),
    ],
)
def test_values_out_of_range_are_rejected_by_path(options: dict[str, Any], path: str) -> None:
    with pytest.raises(ValueError, match=f"^{path}: "):
        encode("hi", **options)


@pytest.mark.parametrize(
    ("prompt", "path", "message"),
    [
        ("secret\udcff" * 999, "text_prompt.text", "is not valid UTF-8"),
        (TextPrompt(text=cast(str, b"secret\xff")), "text_prompt.text", "is not valid UTF-8"),
        (TextPrompt(text=cast(str, ["secret"])), "text_prompt.text", "must be a str, not list"),
        (
            [ChatMessage("user", "Hi"), ChatMessage("user", "secret\udcff")],
            "chat_prompt.messages[1].parts[0].text",
            "is not valid UTF-8",
        ),
    ],
)
def test_a_bad_prompt_is_named_and_not_repeated(prompt: Any, path: str, message: str) -> None:
    with pytest.raises(ValueError, match="prompt") as caught:
        encode(prompt)

    assert str(caught.value) == f"{path}: the prompt {message}"


def test_a_long_value_that_does_not_fit_is_cut_short() -> None:
    with pytest.raises(
        ValueError, match=r"^temperature: must be a number, not the str 'hot"
    ) as caught:
        encode("hi", temperature="hot " * 999)

    assert len(str(caught.value)) < 200


def test_token_ids_that_do_not_fit_name_their_place() -> None:
    with pytest.raises(ValueError, match=r"^token_prompt.ids\[1\]: "):
        encode([1, -1])


def test_an_unknown_option_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"^temprature: no such option; did you mean temperature\?"):
        encode("hi", temprature=1.0)


@pytest.mark.parametrize(
    ("field", "keyword"),
    [
        ("num_outputs", "n"),
        ("stop_strings", "stop"),
        ("resume_timeout", "resume_timeout_s"),
        ("salt", "cache_salt"),
        ("ttft_timeout", "ttft_timeout_s"),
    ],
)
def test_a_field_of_the_contract_suggests_its_keyword(field: str, keyword: str) -> None:
    with pytest.raises(TypeError, match=rf"^{field}: no such option; did you mean {keyword}\?$"):
        encode("hi", **{field: 1})


def test_a_request_object_cannot_be_combined_with_options() -> None:
    request = build_request("hi", {})

    assert build_request(request, {}) is request
    with pytest.raises(TypeError, match="n, seed"):
        build_request(request, {"seed": 1, "n": 1})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_tokens": "3"}, "max_tokens: must be an int, not the str '3'"),
        ({"max_tokens": -1}, "max_tokens: must be at least 1, not -1"),
        (
            {"max_tokens": 1 << 32},
            "max_tokens: must be at most 4294967295, not 4294967296",
        ),
        ({"n": -1}, "n: must be at least 1, not -1"),
        ({"min_tokens": -1}, "min_tokens: must be at least 0, not -1"),
        ({"temperature": "hot"}, "temperature: must be a number, not the str 'hot'"),
        ({"model": 7}, "model: must be a str, not the int 7"),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_what_its_field_takes(
    options: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        encode("hi", **options)


@pytest.mark.parametrize("prompt", [12, None, b"hi", 1.5])
def test_a_prompt_of_a_wrong_type_is_named(prompt: Any) -> None:
    kind = type(prompt).__name__
    with pytest.raises(TypeError, match=f"^prompt: must be a str, .*, not {kind}$"):
        encode(prompt)


@pytest.mark.parametrize("given", [{"type": "object"}, "[0-9]+", True])
def test_a_constraint_of_another_type_is_not_dropped(given: Any) -> None:
    wanted = "JsonSchemaConstraint or RegexConstraint or GrammarConstraint or ChoiceConstraint"
    with pytest.raises(TypeError, match=f"^constraint: must be {wanted}, not "):
        encode(constraint=given)


def test_an_option_that_is_none_is_not_set() -> None:
    assert encode(**dict.fromkeys(EVERYTHING)) == encode()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stop": 3}, "stop: must be a list, not int"),
        ({"stop_token_ids": 3}, "stop_token_ids: must be a list, not int"),
        ({"logit_bias": 3}, "logit_bias: must be a list, not int"),
        ({"logit_bias": [5]}, "logit_bias[0]: must be a token id and its bias"),
        ({"adapter": "foo"}, "adapter: must be Adapter, not str"),
        ({"echo": 10**30}, "echo: "),
        ({"resume_timeout_s": "x"}, "resume_timeout_s: "),
        ({"constraint": ChoiceConstraint(choices=cast(Any, 3))}, "constraint.choice.choices: "),
    ],
)
def test_an_option_of_another_type_is_named(options: dict[str, Any], expected: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(expected)}"):
        encode(**options)


@pytest.mark.parametrize(
    ("fields_of_request", "expected"),
    [
        ({"sampling": {"n": 1}}, "sampling: must be SamplingOptions, not dict"),
        ({"output": None}, "output: must be OutputOptions, not NoneType"),
        ({"stopping": StoppingOptions(stop=cast(Any, "abc"))}, "stop: must be a"),
        ({"prompt": "hi"}, "prompt: must be TextPrompt or ChatPrompt or TokenPrompt, not str"),
        ({"prompt": ChatPrompt(messages=cast(Any, 3))}, "chat_prompt.messages: must be a list"),
        (
            {"prompt": ChatPrompt(messages=[ChatMessage("user", cast(Any, 3))])},
            "chat_prompt.messages[0].content: must be a str or a list, not int",
        ),
        (
            {"prompt": ChatPrompt(messages=[ChatMessage("user", cast(Any, [3]))])},
            "chat_prompt.messages[0].parts[0]: must be str or Image, not int",
        ),
    ],
)
def test_a_part_of_a_request_of_another_type_is_named(
    fields_of_request: dict[str, Any], expected: str
) -> None:
    request = GenerationRequest(**{"prompt": TextPrompt(text="hi"), **fields_of_request})
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}"):
        encode_request(request)


@pytest.mark.parametrize(
    "name", ["address", "token", "tls", "credentials", "retry", "channel", "pool", "multiplex"]
)
def test_an_argument_of_the_client_of_another_type_is_named(name: str) -> None:
    arguments: dict[str, Any] = {name: 3}
    with pytest.raises(TypeError, match=f"^{name}: must be .*, not int$"):
        Client(**arguments)


async def test_an_argument_of_a_call_of_another_type_is_named() -> None:
    five: Any = 5
    async with Client() as client:
        for call, expected in (
            (client.cancel, "request_id: must be a str"),
            (client.get_model, "name: must be a str"),
            (client.health, "service: must be a str"),
            (client.detokenize, "token_ids: must be a list"),
            (lambda _: client.get_model(deadline_s=cast(Any, "x")), "deadline_s: must be"),
        ):
            with pytest.raises((TypeError, ValueError), match=f"^{expected}"):
                await call(five)
        with pytest.raises(TypeError, match=r"^point: must be ResumePoint or str, not int$"):
            client.resume(five)
        with pytest.raises(ValueError, match=r"^request_id: must be a str"):
            await anext(client.resume(ResumePoint(request_id=five)))
