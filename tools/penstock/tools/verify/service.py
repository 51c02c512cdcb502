"""Checks of the service itself: health, gRPC reflection, the description of the model, and its
tokenizer.
"""

import unicodedata
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2

from penstock.client import HealthStatus, ModelState, TextPrompt
from penstock.client.call_settings import Pairs
from penstock.client.channel import grpc_target
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckFailed,
    CheckSkipped,
    require,
)
from penstock.tools.verify.subject import CALL_DEADLINE_S, Subject

_SERVICES = frozenset(
    {"penstock.v1.GenerationService", "penstock.v1.ModelService", "grpc.health.v1.Health"}
)
# Both versions of the reflection API have the same messages; clients use either.
_REFLECTION_METHODS = tuple(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    for version in ("v1", "v1alpha")
)
_ROUND_TRIPS = (
    "The quick brown fox jumps over the lazy dog.",
    "Grüße aus Köln, naïve café – déjà vu",
    "水門は川の流れを調える。",
    "🌊 👩‍🔬 🇨🇭 ∑ → ∞",
)


async def _health(subject: Subject) -> str:
    status = await subject.client.health()
    require(status is HealthStatus.SERVING, f"grpc.health.v1 reports {status.name}")
    return "SERVING"


async def _reflection(subject: Subject) -> str:
    metadata: Pairs = ()
    if subject.open_channel is None:
        opened = grpc.aio.insecure_channel(grpc_target(subject.address))
    else:
        opened, metadata = subject.open_channel()
    async with opened as channel:
        for method in _REFLECTION_METHODS:
            try:
                listed = await _listed_services(channel, method, metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                    raise
                raise CheckSkipped("the credentials have no right to inspect") from None
            missing = _SERVICES - listed
            require(not missing, f"{method}: does not list {', '.join(sorted(missing))}")
    return "v1 and v1alpha list all services"


async def _listed_services(channel: grpc.aio.Channel, method: str, metadata: Pairs) -> set[str]:
    ask: Any = channel.stream_stream(
        method,
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def questions() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for answer in ask(questions(), timeout=CALL_DEADLINE_S, metadata=metadata):
        return {service.name for service in answer.list_services_response.service}
    raise CheckFailed(f"{method}: no answer")


async def _model(subject: Subject) -> str:
    model = await subject.client.get_model()
    subject.found_model = model
    limits = model.limits
    require(model.state is ModelState.READY, f"the model is {model.state.name}")
    require(bool(model.executor), "no executor is named")
    for name in ("vocab_size", "max_total_tokens", "max_prompt_tokens", "max_output_tokens"):
        require(bool(getattr(limits, name)), f"limits.{name} is not published")
    num_features = sum(is_there for _, is_there in model.features)
    return (
        f"{model.executor} executor, context {limits.max_total_tokens}, vocabulary"
        f" {limits.vocab_size}, {num_features} features"
    )


async def _tokenizer(subject: Subject) -> str:
    num_tokens = 0
    for text in _ROUND_TRIPS:
        asked = TextPrompt(text=text, add_special_tokens=False)
        ids = (await subject.client.tokenize(asked)).token_ids
        require(bool(ids), f"no tokens for {text!r}")
        require(max(ids) < subject.vocab_size, f"token {max(ids)} is outside the vocabulary")
        back = await subject.client.detokenize(ids)
        # Some tokenizers add a leading space or normalise the text; both count as equal.
        require(_plain(back) == _plain(text), f"{text!r} came back as {back!r}")
        num_tokens += len(ids)
    return f"{len(_ROUND_TRIPS)} texts, {num_tokens} tokens, multi-byte characters whole"


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).strip()


CHECKS = (
    Check(name="health", run=_health, needs_model=False),
    Check(name="reflection", run=_reflection, needs_model=False),
    Check(name="model", run=_model, needs_model=False),
    Check(name="tokenizer", run=_tokenizer, feature="text_prompt"),
)
