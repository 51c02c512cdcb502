"""The features of an executor are published. A request that needs a missing feature is rejected
with the feature's name.
"""

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
from support.fronts import INFO, RichError, ServedFront, collect, rich_error, serving
from support.generate_requests import text_request


async def rejected(served: ServedFront, message: pb.GenerateRequest) -> RichError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served.stub.Generate(message))
    return rich_error(caught.value)


async def test_unsupported_features_are_published_and_rejected_by_name(text: ModelText) -> None:
    async with serving(text, is_up=False) as served:
        served.port.info = bare_info()
        served.port.come_up()
        message = text_request()
        message.sampling.seed = 0
        error = await rejected(served, message)
        assert error.code is grpc.StatusCode.UNIMPLEMENTED
        assert error.info.reason == "FEATURE_UNSUPPORTED"
        assert dict(error.info.metadata) == {"feature": "seed", "field": "sampling.seed"}
        models = model_service_pb2_grpc.ModelServiceStub(served.channel)
        model = (await models.GetModel(model_service_pb2.GetModelRequest())).model
        offered = {feature: getattr(model.features, feature.value) for feature in Feature}
        # The scheduler implements retention, so every executor has it.
        assert offered == {feature: feature is Feature.CACHE_RETENTION for feature in Feature}
        assert all(model.features.HasField(feature.value) for feature in Feature)
        assert model.limits.max_constraint_bytes == 0
        assert model.adapters == []


KEEPS: dict[str, tuple[str, Callable[[pb.GenerateRequest], object]]] = {
    "cache_retention": ("cache.retention", lambda m: m.cache.retention.SetInParent()),
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
async def test_retention_and_sessions_are_offered_if_scheduler_or_engine_supports_them(
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
            message = text_request()
            ask(message)
            if is_offered:
                call = served.stub.Generate(message)
                (spec,) = await served.port.next_submission()
                assert bool(spec.session_id) is (feature == "sessions")
                served.port.finish(spec.key)
                await collect(call)
                continue
            error = await rejected(served, message)
            assert error.info.reason == "FEATURE_UNSUPPORTED"
            assert dict(error.info.metadata) == {"feature": feature, "field": path}


def test_every_feature_of_an_executor_is_one_of_the_contract() -> None:
    published = {field.name for field in model_pb2.ModelFeatures.DESCRIPTOR.fields}
    assert {feature.value for feature in Feature} <= published


async def test_executor_features_are_published(text: ModelText) -> None:
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


def bare_info() -> ExecutorInfo:
    return replace(INFO, features=frozenset(), adapters=())
