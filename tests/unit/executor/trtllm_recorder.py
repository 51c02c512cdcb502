"""A `Package` whose classes only record their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from penstock.executor.trtllm.package import Package
from support.trtllm_facts import facts, of_release_1_2

_CLASSES = facts()["classes"]
SAMPLING_FIELDS = frozenset(_CLASSES["tensorrt_llm.SamplingParams"]["fields"])
GENERATE_ARGUMENTS = frozenset(
    of_release_1_2(_CLASSES["tensorrt_llm.LLM"]["methods"]["generate_async"]["parameters"])
)
"""Of release 1.2; sampling fields also of later releases."""


@dataclass(eq=False)
class RecordedArguments:
    """The keyword arguments of a call of a `Recorder`."""

    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments


class Recorder:
    """Stands for a class. A call returns its arguments, and may have only the keywords `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(names)]
        )

    def __call__(self, **arguments: Any) -> RecordedArguments:
        unknown = arguments.keys() - self.__signature__.parameters.keys()
        assert not unknown, unknown
        return RecordedArguments(arguments)


def recording_package(
    *,
    generate_arguments: frozenset[str] = GENERATE_ARGUMENTS,
    sampling_fields: frozenset[str] = SAMPLING_FIELDS,
    honours_penalties: bool = False,
    version: str = "1.2.0",
) -> Package:
    """Return a package of `version`. Its `generate_async` accepts `generate_arguments`, and its
    sampling parameters accept `sampling_fields`.
    """

    def recorder(name: str) -> Any:
        record = facts()["classes"][f"tensorrt_llm.{name}"]
        made = record.get("methods", {}).get("__init__")
        return Recorder(record["fields"] if made is None else made["parameters"])

    return Package(
        version=version,
        sampling_params=Recorder(sampling_fields),
        request_error=RuntimeError,
        guided_decoding_params=recorder("llmapi.GuidedDecodingParams"),
        lora_request=recorder("llmapi.LoRARequest"),
        retention_config=recorder("llmapi.KvCacheRetentionConfig"),
        token_range_retention_config=recorder(
            "llmapi.KvCacheRetentionConfig.TokenRangeRetentionConfig"
        ),
        generate_arguments=generate_arguments,
        llm_arguments=frozenset(),
        build=recorder("LLM"),
        honours_penalties=honours_penalties,
    )
