"""docs/tensorrt-llm-mapping.md against the code: fields, arguments, features, settings."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from google.protobuf.descriptor import Descriptor

from penstock.executor.trtllm.config import (
    Adapter,
    DecodingType,
    GuidedDecodingBackend,
    KvCacheSettings,
    LoraSettings,
    SamplerPromise,
    SamplerType,
    SpeculativeSettings,
    TrtllmConfig,
)
from penstock.executor.trtllm.request_mapping import RequestMapping
from penstock.executor.trtllm.samplers import offered_features
from penstock.scheduler.executor import Feature
from penstock.scheduler.request import (
    CacheRetention,
    Constraint,
    ConstraintKind,
    RequestSpec,
    SamplingParams,
)
from penstock.server.rpc.mapping_in.generation import MAPPED_FIELDS
from penstock.server.rpc.mapping_in.prompt import REFUSED_FIELDS
from penstock.v1.generation_service_pb2 import GenerateRequest
from penstock.v1.model_pb2 import ModelFeatures
from support.core import make_spec
from support.trtllm_facts import class_path, facts, parameters_of
from support.trtllm_recorder import GENERATE_ARGUMENTS, Made, recording_package

DOC = Path(__file__).parents[2] / "docs" / "tensorrt-llm-mapping.md"
CODE = re.compile(r"`([^`]+)`")
ARGUMENT = re.compile(r"(?:generate_async|[A-Z]\w+)\.\w+")
ADAPTERS = LoraSettings(adapters=(Adapter(name="law", path=Path("/loras/law"), id=1),))
FULL = TrtllmConfig(
    sampler_honours=tuple(SamplerPromise),
    guided_decoding_backend=GuidedDecodingBackend.XGRAMMAR,
    lora_config=ADAPTERS,
)


@dataclass(frozen=True)
class Row:
    """Cells of a table's row, the first one's backticks taken off."""

    name: str
    cells: tuple[str, ...]


@cache
def tables() -> dict[str, list[Row]]:
    """Rows by the head of their table's first two columns."""
    found: dict[str, list[Row]] = {}
    head = ""
    for line in DOC.read_text().splitlines():
        if not line.startswith("|"):
            head = ""
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = "|".join(cells[:2])
            assert head not in found
            found[head] = []
        elif set(line) - set("|- "):
            found[head].append(Row(cells[0].strip("`"), tuple(cells[1:])))
    return found


FIELDS = tables()["field|where it goes"]


def leaves(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """Paths of its fields; one that is refused as a whole is not looked into."""
    for field in message.fields:
        path, inner = prefix + field.name, field.message_type
        is_ours = inner is not None and inner.file.package == message.file.package
        if inner is not None and is_ours and path not in REFUSED_FIELDS:
            yield from leaves(inner, f"{path}.")
        else:
            yield path


def test_every_field_of_the_contract_has_one_row() -> None:
    named = [row.name for row in FIELDS]
    assert len(set(named)) == len(named)
    assert set(named) == MAPPED_FIELDS | REFUSED_FIELDS.keys()
    assert set(named) == set(leaves(GenerateRequest.DESCRIPTOR))


def named_arguments() -> set[str]:
    texts = [row.cells[0] for row in FIELDS]
    texts += [row.name for row in tables()["argument|value"]]
    return {name for text in texts for name in ARGUMENT.findall(text)}


def requests() -> Iterator[RequestSpec]:
    """Between them they ask for everything that can be asked for."""
    plain = make_spec(1, [5, 6, 7], max_tokens=9, stop_ids=(30, 2))
    sampling = SamplingParams(
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias=((3, 1.0),),
        num_logprobs=2,
    )
    yield replace(plain, sampling=sampling, adapter="law", retention=CacheRetention())
    yield replace(plain, min_tokens=2)
    for kind in ConstraintKind:
        yield replace(plain, constraint=Constraint(kind=kind, texts=("a",)))


def passed_arguments() -> set[str]:
    package = recording_package(generate_arguments=GENERATE_ARGUMENTS | {"priority"})
    mapping = RequestMapping(FULL, package, vocab_size=100)
    found: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                collect(item)
        elif isinstance(value, Made):
            found.update(f"{value.kind}.{name}" for name in value.arguments)
            for inner in value.arguments.values():
                collect(inner)

    for spec in requests():
        arguments = mapping.arguments(spec, spec.prompt_ids)
        found.update(f"generate_async.{name}" for name in arguments)
        collect(list(arguments.values()))
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="a logit bias needs the torch extra"
)
def test_the_arguments_named_are_the_ones_passed() -> None:
    assert named_arguments() == passed_arguments()


def test_every_argument_named_is_in_the_recorded_table() -> None:
    generate = facts()["classes"]["tensorrt_llm.LLM"]["methods"]["generate_async"]["parameters"]
    for name in named_arguments():
        owner, _, argument = name.partition(".")
        if owner == "generate_async":
            assert argument in generate, name
        else:
            path = class_path(owner)
            assert path is not None, name
            assert argument in parameters_of(path), name


def test_every_feature_named_exists_and_all_of_the_executors_have_a_row() -> None:
    published = set(ModelFeatures.DESCRIPTOR.fields_by_name)
    needed = {name for row in FIELDS for name in CODE.findall(row.cells[1])}
    assert needed <= published
    features = {row.name for row in tables()["feature|offered"]}
    assert features == {feature.value for feature in Feature}
    assert features <= needed


def test_what_is_refused_is_refused_by_the_feature_named() -> None:
    never = set(Feature) - offered_features(FULL, recording_package())
    for row in FIELDS:
        is_refused = row.cells[0] == "refused"
        (feature,) = CODE.findall(row.cells[1]) or ("",)
        assert is_refused == (
            row.name in REFUSED_FIELDS or feature in {item.value for item in never}
        ), row.name
        if row.name in REFUSED_FIELDS:
            assert feature == REFUSED_FIELDS[row.name]


EAGLE = SpeculativeSettings(
    decoding_type=DecodingType.EAGLE, max_draft_len=1, speculative_model=Path("/models/eagle")
)
GUIDED = {"guided_decoding_backend": GuidedDecodingBackend.LLGUIDANCE}
OFFERED: dict[Feature, list[tuple[dict[str, Any], bool]]] = {
    Feature.LOGPROBS: [({}, True), ({"speculative_config": EAGLE}, False)],
    Feature.LOGIT_BIAS: [({}, True), ({"speculative_config": EAGLE}, False)],
    Feature.PENALTIES: [({}, False), ({"sampler_type": SamplerType.TRTLLM}, True)],
    Feature.SEED: [({}, False), ({"sampler_type": SamplerType.TRTLLM}, True)],
    Feature.MIN_TOKENS: [({}, False), ({"sampler_honours": (SamplerPromise.MIN_TOKENS,)}, True)],
    Feature.MIN_P: [({}, False), ({"sampler_honours": (SamplerPromise.MIN_P,)}, True)],
    Feature.JSON_SCHEMA: [({}, False), (GUIDED, True)],
    Feature.REGEX: [
        (GUIDED, False),
        ({"guided_decoding_backend": GuidedDecodingBackend.XGRAMMAR}, True),
    ],
    Feature.CHOICE: [({}, False), (GUIDED, True)],
    Feature.GRAMMAR: [
        (GUIDED, False),
        ({"guided_decoding_backend": GuidedDecodingBackend.XGRAMMAR}, True),
    ],
    Feature.ADAPTERS: [({}, False), ({"lora_config": ADAPTERS}, True)],
    Feature.CACHE_RETENTION: [
        ({}, True),
        ({"kv_cache_config": KvCacheSettings(enable_block_reuse=False)}, False),
    ],
    Feature.PROMPT_LOGPROBS: [({}, False)],
}
"""What the table states in words: settings, and whether the feature is offered under them."""


@pytest.mark.parametrize("feature", Feature)
def test_features_are_offered_under_the_settings_named(feature: Feature) -> None:
    for settings, is_offered in OFFERED[feature]:
        offered = offered_features(TrtllmConfig(**settings), recording_package())
        assert (feature in offered) is is_offered, settings


def setting_paths(owner: Any, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(owner)
    for item in fields(owner):
        yield prefix + item.name
        for kind in (hints[item.name], *get_args(hints[item.name])):
            if is_dataclass(kind):
                yield from setting_paths(kind, f"{prefix}{item.name}.")


def test_every_setting_named_exists() -> None:
    known = set(setting_paths(TrtllmConfig))
    by_purpose = {
        name for row in tables()["purpose|setting"] for name in CODE.findall(row.cells[0])
    }
    assert by_purpose
    assert by_purpose <= known
    by_feature = {
        name for row in tables()["feature|offered"] for name in CODE.findall(row.cells[0])
    }
    assert by_feature - {feature.value for feature in Feature} <= known
