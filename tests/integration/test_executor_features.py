"""Features of an executor are published; a request for a missing one is rejected by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from penstock.scheduler.executor import ExecutorInfo, Feature
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_pb2, model_service_pb2, model_service_pb2_grpc
from penstock.v1.prompt_pb2 import ContentPart
from support.fronts import INFO, RichError, ServedFront, collect, rich_error, serving


async def refused(served: ServedFront, message: pb.GenerateRequest) -> RichError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served.stub.Generate(message))
    return rich_error(caught.value)


ASKS_FOR: dict[Feature, tuple[str, Callable[[pb.GenerateRequest], object]]] = {
    Feature.SEED: ("sampling.seed", lambda m: setattr(m.sampling, "seed", 0)),
    Feature.MIN_P: ("sampling.min_p", lambda m: setattr(m.sampling, "min_p", 0.5)),
    Feature.MIN_TOKENS: ("stopping.min_tokens", lambda m: setattr(m.stopping, "min_tokens", 1)),
    Feature.LOGPROBS: ("output.logprobs", lambda m: setattr(m.output, "logprobs", 0)),
    Feature.PROMPT_LOGPROBS: (
        "output.prompt_logprobs",
        lambda m: setattr(m.output, "prompt_logprobs", 0),
    ),
    Feature.LOGIT_BIAS: (
        "sampling.logit_bias",
        lambda m: m.sampling.logit_bias.add(token_id=1, bias=1.0),
    ),
    Feature.PENALTIES: (
        "sampling.presence_penalty",
        lambda m: setattr(m.sampling, "presence_penalty", 0.5),
    ),
    Feature.JSON_SCHEMA: (
        "constraint.json_schema",
        lambda m: setattr(m.constraint.json_schema, "schema", "{}"),
    ),
    Feature.REGEX: ("constraint.regex", lambda m: setattr(m.constraint.regex, "pattern", "a")),
    Feature.GRAMMAR: (
        "constraint.grammar",
        lambda m: setattr(m.constraint.grammar, "ebnf", "root ::= 'a'"),
    ),
    Feature.CHOICE: ("constraint.choice", lambda m: m.constraint.choice.choices.append("a")),
    Feature.ADAPTERS: ("adapter", lambda m: setattr(m.adapter, "name", "a")),
    Feature.CACHE_RETENTION: ("cache.retention", lambda m: m.cache.retention.SetInParent()),
}
"""A request for each optional executor feature, and the field path in its rejection."""


async def test_executor_without_a_feature_refuses_it(text: ModelText) -> None:
    async with serving(text, is_up=False) as served:
        served.port.info = bare_info()
        served.port.come_up()
        for feature, (path, ask) in ASKS_FOR.items():
            if feature is Feature.CACHE_RETENTION:
                continue  # the scheduler's own, see below
            message = pb.GenerateRequest()
            message.text_prompt.text = "hello"
            ask(message)
            error = await refused(served, message)
            assert error.code is grpc.StatusCode.UNIMPLEMENTED
            assert error.info.reason == "FEATURE_UNSUPPORTED"
            assert error.info.metadata["feature"] == feature.value
            assert error.info.metadata["field"] == path
        models = model_service_pb2_grpc.ModelServiceStub(served.channel)
        model = (await models.GetModel(model_service_pb2.GetModelRequest())).model
        for feature in Feature:
            assert model.features.HasField(feature.value)
            is_ours = feature is Feature.CACHE_RETENTION
            assert getattr(model.features, feature.value) is is_ours
        assert model.limits.max_constraint_bytes == 0
        assert model.adapters == []


KEEPS: dict[str, tuple[str, Callable[[pb.GenerateRequest], object]]] = {
    "cache_retention": ASKS_FOR[Feature.CACHE_RETENTION],
    "sessions": ("cache.session_id", lambda m: setattr(m.cache, "session_id", "a")),
}


@pytest.mark.parametrize(
    ("config", "is_self_paced", "features", "is_offered"),
    [
        (FrontConfig(), False, frozenset(), True),
        (FrontConfig(), True, frozenset(), False),
        (FrontConfig(), True, frozenset({Feature.CACHE_RETENTION}), True),
        (FrontConfig(is_prefix_caching=False), False, frozenset(), False),
    ],
)
async def test_blocks_are_kept_by_the_scheduler_or_by_an_engine_that_can(
    text: ModelText,
    config: FrontConfig,
    is_self_paced: bool,
    features: frozenset[Feature],
    is_offered: bool,
) -> None:
    async with serving(text, config, is_up=False) as served:
        served.port.info = replace(
            bare_info(), is_self_paced=is_self_paced, pipeline_depth=1, features=features
        )
        served.port.come_up()
        models = model_service_pb2_grpc.ModelServiceStub(served.channel)
        model = (await models.GetModel(model_service_pb2.GetModelRequest())).model
        for feature, (path, ask) in KEEPS.items():
            assert getattr(model.features, feature) is is_offered
            message = pb.GenerateRequest()
            message.text_prompt.text = "hello"
            ask(message)
            if is_offered:
                call = served.stub.Generate(message)
                (spec,) = await served.port.next_submission()
                assert bool(spec.session_id) is (feature == "sessions")
                served.port.finish(spec.key)
                await collect(call)
                continue
            error = await refused(served, message)
            assert error.info.reason == "FEATURE_UNSUPPORTED"
            assert dict(error.info.metadata) == {"feature": feature, "field": path}


def test_every_feature_of_an_executor_is_one_of_the_contract() -> None:
    assert set(ASKS_FOR) == set(Feature)
    published = {field.name for field in model_pb2.ModelFeatures.DESCRIPTOR.fields}
    assert {feature.value for feature in Feature} <= published


async def test_what_the_executor_offers_is_published(text: ModelText) -> None:
    async with serving(text, FrontConfig(max_constraint_bytes=777), is_up=False) as served:
        models = model_service_pb2_grpc.ModelServiceStub(served.channel)
        unknown = (await models.GetModel(model_service_pb2.GetModelRequest())).model
        assert not any(unknown.features.HasField(feature.value) for feature in Feature)
        assert not unknown.limits.HasField("max_constraint_bytes")
        served.port.info = replace(served.port.info, max_prompt_tokens=100)
        served.port.come_up()
        model = (await models.GetModel(model_service_pb2.GetModelRequest())).model
        assert all(getattr(model.features, feature.value) for feature in Feature)
        assert model.adapters == ["pirate", "poet"]
        assert model.limits.max_constraint_bytes == 777
        assert model.limits.max_prompt_tokens == 100
        assert model.limits.max_total_tokens == 512


@pytest.mark.parametrize("prompt", ["text", "token_ids", "chat"])
async def test_a_prompt_longer_than_the_executor_takes_is_named(
    text: ModelText, prompt: str
) -> None:
    async with serving(text, is_up=False) as served:
        served.port.info = replace(served.port.info, max_prompt_tokens=20)
        served.port.come_up()
        message = pb.GenerateRequest()
        if prompt == "text":
            message.text_prompt.text = "A horse, a horse! " * 20
        elif prompt == "token_ids":
            message.token_prompt.ids.extend([5] * 21)
        else:
            message.chat_prompt.messages.add(
                role="user", parts=[ContentPart(text="A horse, a horse! " * 20)]
            )
        error = await refused(served, message)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.info.reason == "PROMPT_TOO_LONG"
        assert error.info.metadata["max_prompt_tokens"] == "20"
        assert int(error.info.metadata["num_prompt_tokens"]) > 20
        assert error.fields == [
            {"text": "text_prompt.text", "chat": "chat_prompt.messages"}.get(
                prompt, "token_prompt.ids"
            )
        ]


async def test_unknown_adapter_is_not_found(served: ServedFront) -> None:
    message = pb.GenerateRequest()
    message.text_prompt.text = "hello"
    message.adapter.name = "nobody"
    error = await refused(served, message)
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert error.info.reason == "ADAPTER_NOT_FOUND"
    assert error.info.metadata["adapter"] == "nobody"


async def test_no_seed_is_told_where_none_is_honoured(text: ModelText) -> None:
    async with serving(text, is_up=False) as served:
        served.port.info = bare_info()
        served.port.come_up()
        message = pb.GenerateRequest()
        message.text_prompt.text = "hello"
        call = served.stub.Generate(message)
        (spec,) = await served.port.next_submission()
        served.port.finish(spec.key)
        accepted = (await collect(call))[0].accepted
        assert accepted.request_id
        assert accepted.seed == 0
        assert spec.sampling.seed != 0  # some executors take it all the same


def bare_info() -> ExecutorInfo:
    return replace(INFO, features=frozenset(), adapters=())
