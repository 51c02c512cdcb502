"""A GenerateRequest becomes domain values. The tests cover every limit and every field."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import ParseDict

from penstock.scheduler.executor import Feature
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.front.generation import (
    ChatInput,
    ChunkLimits,
    GenerationSpec,
    TextInput,
    TokenInput,
)
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in import prompt
from penstock.server.rpc.mapping_in.generation import MAPPED_FIELDS, read_generation
from penstock.server.rpc.mapping_in.prompt import UNSUPPORTED_FIELDS
from penstock.v1.generation_service_pb2 import GenerateRequest
from support.fronts import INFO, rejected
from support.generate_requests import text_request
from support.request_edits import (
    Edit,
    adapter,
    add,
    bias,
    chat,
    choices,
    chunk_delay,
    duration,
    edited,
    grammar,
    put,
    regex,
    retention,
    schema,
    tokens,
)

LIMITS = Limits.from_config(FrontConfig(max_prompt_bytes=1000, max_chat_messages=4), INFO)
NAN, INF = math.nan, math.inf


def read(message: GenerateRequest, limits: Limits = LIMITS) -> GenerationSpec:
    return read_generation(message, limits, ("tiny", "alias"))


def violations(message: GenerateRequest) -> list[str]:
    with pytest.raises(RequestError) as caught:
        read(message)
    assert caught.value.reason in {ErrorReason.INVALID_ARGUMENT, ErrorReason.PROMPT_TOO_LONG}
    return [violation.path for violation in caught.value.failure.violations]


OFF_BY_RANGE: list[tuple[str, Edit, str]] = [
    *[
        (f"{field}={value}", put("sampling", field, value), f"sampling.{field}")
        for field, values in {
            "temperature": (NAN, INF, -INF, -0.1, 2.1),
            "top_p": (NAN, INF, 0.0, -0.5, 1.1),
            "min_p": (NAN, -0.1, 1.1),
            "repetition_penalty": (NAN, INF, 0.0, -1.0, 2.1),
            "presence_penalty": (NAN, INF, -2.1, 2.1),
            "frequency_penalty": (NAN, -INF, -2.1, 2.1),
            "top_k": (0,),
            "num_outputs": (0, 17, 2**32 - 1),
        }.items()
        for value in values
    ],
    ("bias id", bias((600, 1.0)), "sampling.logit_bias[0].token_id"),
    ("bias twice", bias((1, 1.0), (1, 2.0)), "sampling.logit_bias[1].token_id"),
    ("bias nan", bias((1, NAN)), "sampling.logit_bias[0].bias"),
    ("bias range", bias((1, 100.5)), "sampling.logit_bias[0].bias"),
    ("bias count", bias(*[(i, 0.0) for i in range(301)]), "sampling.logit_bias"),
    ("max_tokens 0", put("stopping", "max_tokens", 0), "stopping.max_tokens"),
    ("max_tokens -1 on the wire", put("stopping", "max_tokens", 2**32 - 1), "stopping.max_tokens"),
    ("max_tokens", put("stopping", "max_tokens", 512), "stopping.max_tokens"),
    ("min_tokens", put("stopping", "min_tokens", 512), "stopping.min_tokens"),
    ("stop empty", add("stopping", "stop_strings", "a", ""), "stopping.stop_strings[1]"),
    ("stop long", add("stopping", "stop_strings", "a" * 65), "stopping.stop_strings[0]"),
    ("stop count", add("stopping", "stop_strings", *map(str, range(17))), "stopping.stop_strings"),
    ("stop id", add("stopping", "stop_token_ids", 1, 600), "stopping.stop_token_ids[1]"),
    ("stop id count", add("stopping", "stop_token_ids", *range(17)), "stopping.stop_token_ids"),
    ("logprobs", put("output", "logprobs", 21), "output.logprobs"),
    ("prompt_logprobs", put("output", "prompt_logprobs", 21), "output.prompt_logprobs"),
    ("chunk of none", put("output", "min_chunk_tokens", 0), "output.min_chunk_tokens"),
    ("large chunk", put("output", "min_chunk_tokens", 257), "output.min_chunk_tokens"),
    *[
        (f"chunk delay {seconds} {nanos}", chunk_delay(seconds, nanos), "output.max_chunk_delay")
        for seconds, nanos in ((-1, 0), (0, -5), (1, -1), (1, 10**9), (10, 1), (2**60, 0))
    ],
    ("priority", put("scheduling", "priority", 101), "scheduling.priority"),
    ("priority", put("scheduling", "priority", -101), "scheduling.priority"),
    *[
        (f"{field} {seconds} {nanos}", duration(field, seconds, nanos), f"scheduling.{field}")
        for field in ("ttft_timeout", "total_timeout", "time_limit")
        for seconds, nanos in ((0, 0), (-1, 0), (0, -5), (1, -1), (1, 10**9), (2**60, 0))
    ],
    ("long deadline", duration("total_timeout", 3601), "scheduling.total_timeout"),
    ("long ttft", duration("ttft_timeout", 3600, 1000), "scheduling.ttft_timeout"),
    ("salt empty", put("cache", "salt", ""), "cache.salt"),
    ("salt long", put("cache", "salt", "s" * 129), "cache.salt"),
    ("id empty", lambda m: setattr(m, "request_id", ""), "request_id"),
    ("id long", lambda m: setattr(m, "request_id", "r" * 129), "request_id"),
    ("id control", lambda m: setattr(m, "request_id", "a\x00b"), "request_id"),
    ("id not ASCII", lambda m: setattr(m, "request_id", "ü"), "request_id"),
    ("no prompt", lambda m: m.ClearField("text_prompt"), "prompt"),
    ("empty text", lambda m: setattr(m.text_prompt, "text", ""), "text_prompt.text"),
    ("long text", lambda m: setattr(m.text_prompt, "text", "é" * 501), "text_prompt.text"),
    ("no ids", lambda m: m.token_prompt.SetInParent(), "token_prompt.ids"),
    ("id out of vocabulary", tokens(1, 600), "token_prompt.ids[1]"),
    ("varint -1 as id", tokens(2**32 - 1), "token_prompt.ids[0]"),
    ("too many ids", tokens(*[1] * 513), "token_prompt.ids"),
    ("no turns", chat(), "chat_prompt.messages"),
    ("many turns", chat(*[("user", "x")] * 5), "chat_prompt.messages"),
    ("no role", chat(("user", "x"), ("", "y")), "chat_prompt.messages[1].role"),
    ("long role", chat(("r" * 65, "y")), "chat_prompt.messages[0].role"),
    ("long chat", chat(("user", "x" * 600), ("user", "x" * 600)), "chat_prompt.messages"),
    ("constraint of no kind", lambda m: m.constraint.SetInParent(), "constraint"),
]


@pytest.mark.parametrize(
    ("edit", "path"), [pytest.param(edit, path, id=name) for name, edit, path in OFF_BY_RANGE]
)
def test_a_value_out_of_range_is_named(edit: Edit, path: str) -> None:
    assert violations(edited(edit)) == [path]


def test_stop_string_bytes_are_bounded_as_well_as_its_characters() -> None:
    limits = Limits.from_config(FrontConfig(max_stop_string_bytes=10), INFO)
    with pytest.raises(RequestError) as caught:
        read(edited(add("stopping", "stop_strings", "日本語文")), limits)
    assert caught.value.failure.violations[0].path == "stopping.stop_strings[0]"


AT_THE_EDGE: list[Edit] = [
    *[
        put("sampling", field, value)
        for field, values in {
            "temperature": (0.0, 2.0),
            "top_p": (1e-6, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 2.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
            "top_k": (1, 2**32 - 1),
            "num_outputs": (1, 16),
            "seed": (0, 2**64 - 1),
        }.items()
        for value in values
    ],
    bias((599, -100.0), (0, 100.0)),
    put("stopping", "max_tokens", 511),
    add("stopping", "stop_strings", "a" * 64),
    add("stopping", "stop_token_ids", *range(16)),
    put("output", "logprobs", 0),
    put("output", "prompt_logprobs", 20),
    put("scheduling", "priority", 100),
    put("scheduling", "priority", -100),
    duration("ttft_timeout", 0, 1),
    duration("ttft_timeout", 3600),
    duration("total_timeout", 3600),
    lambda m: setattr(m, "request_id", "r" * 128),
    lambda m: setattr(m, "model", "alias"),
    lambda m: setattr(m.text_prompt, "text", "nul \x00 is text"),
    tokens(*[599] * 512),
    chat(("r" * 64, "")),
]


@pytest.mark.parametrize("edit", AT_THE_EDGE)
def test_the_edges_of_every_range_are_allowed(edit: Edit) -> None:
    read(edited(edit))


def test_all_violations_are_collected() -> None:
    message = text_request()
    for edit in (
        put("sampling", "temperature", NAN),
        put("stopping", "max_tokens", 0),
        put("cache", "salt", ""),
        put("output", "logprobs", 99),
    ):
        edit(message)
    assert set(violations(message)) == {
        "sampling.temperature",
        "stopping.max_tokens",
        "cache.salt",
        "output.logprobs",
    }


def test_unset_means_the_default_and_zero_does_not() -> None:
    plain = read(text_request())
    params = plain.sampling.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.num_logprobs, params.num_prompt_logprobs) == (-1, -1)
    assert plain.sampling.seed is None
    assert plain.sampling.num_outputs == 1
    assert plain.stopping.max_tokens is None
    assert isinstance(plain.prompt, TextInput)
    assert plain.prompt.add_special_tokens
    zeros = edited(put("sampling", "temperature", 0.0))
    zeros.sampling.seed = 0
    zeros.output.logprobs = 0
    zeros.text_prompt.add_special_tokens = False
    read_zeros = read(zeros)
    assert read_zeros.sampling.params.temperature == 0.0
    assert read_zeros.sampling.seed == 0
    assert read_zeros.sampling.params.num_logprobs == 0
    assert isinstance(read_zeros.prompt, TextInput)
    assert not read_zeros.prompt.add_special_tokens


def test_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert read(edited(put("sampling", "temperature", 1e-30))).sampling.params.temperature == 0


def test_top_k_of_the_whole_vocabulary_is_disabled() -> None:
    assert read(edited(put("sampling", "top_k", 600))).sampling.params.top_k == 0
    assert read(edited(put("sampling", "top_k", 599))).sampling.params.top_k == 599


def test_each_kind_of_prompt() -> None:
    assert read(edited(tokens(1, 2, 3))).prompt == TokenInput(ids=(1, 2, 3))
    prompt = read(edited(chat(("user", "hi"), ("assistant", "")))).prompt
    assert isinstance(prompt, ChatInput)
    assert [(m.role, m.content) for m in prompt.messages] == [("user", "hi"), ("assistant", "")]
    assert prompt.add_generation_prompt


def test_prompt_longer_than_the_context_has_its_own_reason() -> None:
    with pytest.raises(RequestError) as caught:
        read(edited(tokens(*[1] * 513)))
    failure = caught.value.failure
    assert failure.reason is ErrorReason.PROMPT_TOO_LONG
    assert failure.metadata == {
        "num_prompt_tokens": "513",
        "max_total_tokens": "512",
        "max_prompt_tokens": "511",
    }


@pytest.mark.parametrize("name", ["other", ""])
def test_unknown_model(name: str) -> None:
    with rejected(ErrorReason.MODEL_NOT_FOUND) as caught:
        read(edited(lambda m: setattr(m, "model", name)))
    assert caught.value.failure.message == f"model {name!r} not found; available: alias, tiny"


def test_a_misspelt_model_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(RequestError) as caught:
        read(edited(lambda m: setattr(m, "model", "tinny")))
    assert caught.value.failure.message == "model 'tinny' not found; did you mean tiny?"


@pytest.mark.parametrize(
    ("edit", "feature"),
    [
        (put("sampling", "repetition_penalty", 1.1), Feature.PENALTIES),
        (put("sampling", "presence_penalty", 0.1), Feature.PENALTIES),
        (put("sampling", "frequency_penalty", -0.1), Feature.PENALTIES),
        (bias((1, 1.0)), Feature.LOGIT_BIAS),
        (put("output", "logprobs", 0), Feature.LOGPROBS),
        (put("output", "prompt_logprobs", 0), Feature.PROMPT_LOGPROBS),
    ],
)
def test_features_that_the_executor_lacks_are_rejected(edit: Edit, feature: Feature) -> None:
    limits = replace(LIMITS, features=INFO.features - {feature})
    with rejected(ErrorReason.FEATURE_UNSUPPORTED) as caught:
        read(edited(edit), limits)
    assert caught.value.failure.metadata["feature"] == feature.value
    failure = caught.value.failure
    path = failure.metadata["field"]
    assert failure.message.startswith(f"{path}: is not supported by the {INFO.name} executor; ")


def test_neutral_values_need_no_feature() -> None:
    limits = replace(LIMITS, features=frozenset())
    message = edited(put("sampling", "repetition_penalty", 1.0))
    message.stopping.min_tokens = 0
    message.sampling.presence_penalty = 0.0
    read(message, limits)


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """Yield the path of each field that is not a message of the contract. A well-known type counts
    as a value.
    """
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        child = field.message_type
        if child is None or child.full_name.startswith("google.protobuf."):
            yield path
        else:
            yield from leaves(child, f"{path}.")


def test_chunk_limits_and_their_defaults() -> None:
    assert read(text_request()).output.chunks == ChunkLimits(min_tokens=1, max_delay_s=0.1)
    assert not read(text_request()).output.chunks.is_holding
    wanted = edited(put("output", "min_chunk_tokens", 256))
    chunk_delay(10, 0)(wanted)
    assert read(wanted).output.chunks == ChunkLimits(min_tokens=256, max_delay_s=10.0)
    chunk_delay(0, 0)(wanted)
    assert not read(wanted).output.chunks.is_holding
    small = Limits.from_config(FrontConfig(max_backlog_tokens=64, max_num_outputs=16), INFO)
    assert small.max_chunk_tokens == 4, "all outputs together stay within the backlog"


def test_every_field_of_the_contract_is_mapped_or_rejected() -> None:
    all_fields = set(leaves(GenerateRequest.DESCRIPTOR))
    rejected = {
        path
        for path in all_fields
        if any(path == prefix or path.startswith(f"{prefix}.") for prefix in UNSUPPORTED_FIELDS)
    }
    assert not rejected & MAPPED_FIELDS
    assert all_fields == rejected | MAPPED_FIELDS


CALL: dict[str, Any] = {"id": "1", "name": "weather", "arguments": {"city": "Oslo"}}


def chat_with(**fields: Any) -> Edit:
    prompt = {"messages": [{"role": "user", "parts": [{"text": "x"}]}], **fields}
    return lambda m: ParseDict({"chatPrompt": prompt}, m)


def message_with(**fields: Any) -> Edit:
    return chat_with(messages=[{"role": "user", "parts": [{"text": "x"}], **fields}])


def test_the_values_of_a_chat_s_data_are_bounded_together() -> None:
    """The encoded values are far below the limit of bytes, but converting each value takes long."""
    limits = replace(LIMITS, config=FrontConfig())
    for num, path in ((4090, None), (4200, "chat_prompt.template_arguments")):
        empty: dict[str, Any] = {"a": [{}] * num}
        message = edited(chat_with(tools=[empty], template_arguments=empty))
        if path is None:
            read(message, limits)
            continue
        with pytest.raises(RequestError) as caught:
            read(message, limits)
        assert [one.path for one in caught.value.failure.violations] == [path]


def test_values_of_a_list_that_is_too_long_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_values: list[float] = []
    monkeypatch.setattr(prompt, "_number", read_values.append)
    limits = replace(LIMITS, config=FrontConfig())
    for tool in ({"a": [1] * 9000}, {str(name): 1 for name in range(9000)}):
        with pytest.raises(RequestError):
            read(edited(chat_with(tools=[tool])), limits)
    assert not read_values


EXAMPLES: dict[str, Edit] = {
    "model": lambda m: setattr(m, "model", "other"),
    "request_id": lambda m: setattr(m, "request_id", "r"),
    "text_prompt.text": lambda m: setattr(m.text_prompt, "text", "other"),
    "text_prompt.add_special_tokens": lambda m: setattr(m.text_prompt, "add_special_tokens", False),
    "token_prompt.ids": tokens(1),
    "chat_prompt.messages.role": chat(("system", "x")),
    "chat_prompt.messages.parts.text": chat(("user", "y")),
    "chat_prompt.messages.name": message_with(name="ann"),
    "chat_prompt.messages.tool_calls.id": message_with(tool_calls=[CALL, {**CALL, "id": "2"}]),
    "chat_prompt.messages.tool_calls.name": message_with(tool_calls=[CALL, {**CALL, "name": "n"}]),
    "chat_prompt.messages.tool_calls.arguments": message_with(
        tool_calls=[CALL, {**CALL, "arguments": {"city": "Rome"}}]
    ),
    "chat_prompt.messages.tool_call_id": message_with(tool_call_id="1"),
    "chat_prompt.tools": chat_with(tools=[{"type": "function"}]),
    "chat_prompt.template_arguments": chat_with(template_arguments={"enable_thinking": False}),
    "chat_prompt.add_generation_prompt": chat(("user", "x"), add_generation_prompt=False),
    "chat_prompt.window_tokens": chat(("user", "x"), window_tokens=9),
    "sampling.temperature": put("sampling", "temperature", 0.5),
    "sampling.top_k": put("sampling", "top_k", 5),
    "sampling.top_p": put("sampling", "top_p", 0.5),
    "sampling.min_p": put("sampling", "min_p", 0.5),
    "sampling.repetition_penalty": put("sampling", "repetition_penalty", 1.5),
    "sampling.presence_penalty": put("sampling", "presence_penalty", 0.5),
    "sampling.frequency_penalty": put("sampling", "frequency_penalty", 0.5),
    "sampling.logit_bias.token_id": bias((3, 1.0)),
    "sampling.logit_bias.bias": bias((2, 2.0)),
    "sampling.seed": put("sampling", "seed", 5),
    "sampling.num_outputs": put("sampling", "num_outputs", 2),
    "stopping.max_tokens": put("stopping", "max_tokens", 5),
    "stopping.min_tokens": put("stopping", "min_tokens", 5),
    "stopping.stop_strings": add("stopping", "stop_strings", "x"),
    "stopping.stop_token_ids": add("stopping", "stop_token_ids", 5),
    "stopping.ignore_eos": put("stopping", "ignore_eos", True),
    "stopping.include_stop_string": put("stopping", "include_stop_string", True),
    "output.logprobs": put("output", "logprobs", 1),
    "output.prompt_logprobs": put("output", "prompt_logprobs", 1),
    "output.return_token_ids": put("output", "return_token_ids", True),
    "output.echo": put("output", "echo", True),
    "output.min_chunk_tokens": put("output", "min_chunk_tokens", 4),
    "output.max_chunk_delay": chunk_delay(2, 0),
    "resume_timeout": lambda message: message.resume_timeout.FromSeconds(5),
    "scheduling.priority": put("scheduling", "priority", 5),
    "scheduling.ttft_timeout": duration("ttft_timeout", 5),
    "scheduling.total_timeout": duration("total_timeout", 5),
    "scheduling.time_limit": duration("time_limit", 5),
    "cache.salt": put("cache", "salt", "x"),
    "cache.session_id": put("cache", "session_id", "x"),
    "cache.retention.level": retention(level=5),
    "cache.retention.duration": retention(seconds=5),
    "constraint.json_schema.schema": schema("{}"),
    "constraint.regex.pattern": regex("a"),
    "constraint.grammar.ebnf": grammar("root ::= 'a'"),
    "constraint.choice.choices": choices("a"),
    "adapter.name": adapter("poet"),
    "adapter.scale": adapter("poet", 2.0),
}
"""One request per mapped field, which differs from its neighbour only in that field."""
NEIGHBOURS: dict[str, Edit] = {
    "chat_prompt.messages.role": chat(("user", "x")),
    "chat_prompt.messages.content": chat(("user", "x")),
    "chat_prompt.add_generation_prompt": chat(("user", "x")),
    "chat_prompt.window_tokens": chat(("user", "x")),
    "sampling.logit_bias.token_id": bias((2, 1.0)),
    "sampling.logit_bias.bias": bias((2, 1.0)),
    "cache.retention.level": retention(),
    "cache.retention.duration": retention(),
    "constraint.json_schema.schema": schema("true"),
    "constraint.regex.pattern": regex("b"),
    "constraint.grammar.ebnf": grammar("root ::= 'b'"),
    "constraint.choice.choices": choices("b"),
    "adapter.name": adapter("pirate"),
    "adapter.scale": adapter("poet", 1.0),
}


@pytest.mark.parametrize("path", sorted(MAPPED_FIELDS))
def test_every_mapped_field_makes_a_difference(path: str) -> None:
    plain = read(edited(NEIGHBOURS.get(path, lambda _: None)))
    message = edited(EXAMPLES[path])
    if path in ("model", "adapter.scale"):
        with pytest.raises(RequestError):
            read(message)
    else:
        assert read(message) != plain
