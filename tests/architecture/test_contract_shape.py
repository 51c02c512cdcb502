"""Checks of the API contract that buf does not make: every generated name is exported, no two RPCs
share a message type, fields can be unset, and limits named in comments exist.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

from google.protobuf import descriptor as descriptors
from google.protobuf import descriptor_pool

from penstock import v1

PROTOS = pathlib.Path(v1.__file__).parent
FILES = [
    descriptor_pool.Default().FindFileByName(f"penstock/v1/{path.name}")
    for path in sorted(PROTOS.glob("*.proto"))
]
MESSAGES: list[descriptors.Descriptor] = [
    message for file in FILES for message in file.message_types_by_name.values()
]


def rpc_messages() -> Iterator[str]:
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield method.input_type.name
                yield method.output_type.name


def test_package_exports_everything_that_is_generated() -> None:
    expected = {message.name for message in MESSAGES}
    for file in FILES:
        expected.update(file.enum_types_by_name)
        for service in file.services_by_name:
            expected.update(
                {f"{service}Stub", f"{service}Servicer", f"add_{service}Servicer_to_server"}
            )

    assert set(v1.__all__) == expected


def test_no_two_rpcs_share_a_message_type() -> None:
    names = list(rpc_messages())

    assert sorted(names) == sorted(set(names))


def test_only_chat_template_data_is_free_form() -> None:
    loose = [
        field.full_name
        for message in MESSAGES
        for field in message.fields
        if field.message_type is not None
        and (
            field.message_type.GetOptions().map_entry
            or field.message_type.full_name == "google.protobuf.Struct"
        )
    ]

    # Only the model's chat template reads these.
    assert loose == [
        "penstock.v1.ToolCall.arguments",
        "penstock.v1.ChatPrompt.tools",
        "penstock.v1.ChatPrompt.template_arguments",
    ]


def test_fields_of_model_responses_can_be_unset() -> None:
    silent = [
        field.full_name
        for message in (v1.ModelLimits, v1.ModelFeatures, v1.KeepalivePolicy)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence
    ]

    assert silent == []


def test_numeric_request_options_distinguish_zero_from_unset() -> None:
    groups = (
        v1.SamplingOptions,
        v1.StoppingOptions,
        v1.OutputOptions,
        v1.SchedulingOptions,
        v1.CacheOptions,
        v1.CacheRetention,
    )
    # A plain bool is fine: its default is false.
    ambiguous = [
        field.full_name
        for group in groups
        for field in group.DESCRIPTOR.fields
        if not field.has_presence and not field.is_repeated and field.type != field.TYPE_BOOL
    ]

    assert ambiguous == []


def test_limits_named_in_comments_exist() -> None:
    limits = {field.name for field in v1.ModelLimits.DESCRIPTOR.fields}
    text = "".join(path.read_text(encoding="utf-8") for path in PROTOS.glob("*.proto"))
    named = set(re.findall(r"ModelLimits\.([a-z_]+)", text))

    assert named
    assert named <= limits


def test_frequent_fields_have_one_byte_tags() -> None:
    for message in (v1.GenerateRequest, v1.GenerateResponse, v1.TokenDelta, v1.TokenRecord):
        assert all(field.number <= 15 for field in message.DESCRIPTOR.fields), message
