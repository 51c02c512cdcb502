"""The recorded API of TensorRT-LLM equals the stand-in's and covers what the adapter uses.

The package cannot be installed here. Instead, adapter and stand-in agree with one table, and the
table records the source of every entry.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.source_check import check_source, generation_of, load_facts
from support.fake_trtllm import fake_trtllm as fake_trtllm  # a fixture
from support.trtllm_facts import (
    all_names,
    class_path,
    facts,
    flags_of,
    foreign_class_names,
    keywords_by_callee,
    members_of,
    parameters_of,
    statistics_keys,
    uses_of,
    words_of,
)

ADAPTER = Path(__file__).resolve().parents[2] / "executors" / "penstock" / "executor" / "trtllm"
FAKES = Path(__file__).resolve().parents[1] / "fakes"
MODULES = sorted(ADAPTER.glob("*.py"))
OWN_CLASSES = {"SubmittedRequest"}
OWN_WORDS = {
    "llm_args.py": set[str](),
    "request_mapping.py": {"constraint", "retention", "none"},
}
"""Quoted names that are ours: fields that messages name."""
CALLEES = {
    "sampling_params": "tensorrt_llm.SamplingParams",
    "guided_decoding_params": "tensorrt_llm.llmapi.GuidedDecodingParams",
    "lora_request": "tensorrt_llm.llmapi.LoRARequest",
    "retention_config": "tensorrt_llm.llmapi.KvCacheRetentionConfig",
    "token_range_retention_config": (
        "tensorrt_llm.llmapi.KvCacheRetentionConfig.TokenRangeRetentionConfig"
    ),
    "build": "tensorrt_llm.LLM",
}
"""Fields of `Package` that are called, by the object they refer to."""
CLASSES = sorted(facts()["classes"])


def source_of(name: str) -> str:
    path = ADAPTER / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def found_in_fake(path: str) -> Any:
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


def is_of_the_line(entry: dict[str, Any]) -> bool:
    """Return False for names that only later releases have."""
    return entry.get("since") in (None, "1.2")


def as_recorded(default: Any) -> Any:
    """Return a default as the table writes it."""
    if default is inspect.Parameter.empty:
        return {"required": True}
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "factory"
    return default.value if isinstance(default, enum.Enum) else default


def recorded_default(entry: dict[str, Any]) -> Any:
    default = entry["default"]
    return "factory" if isinstance(default, dict) and "factory" in default else default


def recorded_parameters(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: recorded_default(entry) for name, entry in entries.items() if is_of_the_line(entry)
    }


def parameters_in_fake(function: Any) -> dict[str, Any]:
    return {
        item.name: as_recorded(item.default)
        for item in inspect.signature(function).parameters.values()
        if item.kind is not item.VAR_KEYWORD and item.name != "self"
    }


@pytest.mark.usefixtures("fake_trtllm")
@pytest.mark.parametrize("path", CLASSES)
def test_the_fake_has_the_recorded_fields_and_defaults(path: str) -> None:
    record, made = facts()["classes"][path], found_in_fake(path)

    if "fields" in record:
        assert parameters_in_fake(made) == recorded_parameters(record["fields"])
    if record["kind"] == "model":
        assert list(made.model_fields) == list(parameters_in_fake(made))
    if record["kind"] == "enum":
        assert [member.name for member in made] == record["members"]
    if record["kind"] == "exception":
        assert issubclass(made, RuntimeError)


@pytest.mark.usefixtures("fake_trtllm")
@pytest.mark.parametrize("path", CLASSES)
def test_the_fake_has_the_recorded_methods(path: str) -> None:
    made = found_in_fake(path)

    for name, method in facts()["classes"][path].get("methods", {}).items():
        function = getattr(made, name)
        assert parameters_in_fake(function) == recorded_parameters(method["parameters"]), name
        if "is_coroutine" in method:
            assert inspect.iscoroutinefunction(function) == method["is_coroutine"], name


@pytest.mark.usefixtures("fake_trtllm")
def test_the_fake_has_the_recorded_names_and_no_others() -> None:
    for path, record in facts()["modules"].items():
        module = importlib.import_module(path)
        public = getattr(module, "__all__", record["names"])
        assert set(record["names"]) == set(public), path
        assert all(hasattr(module, name) for name in public), path
    assert importlib.import_module("tensorrt_llm").__version__ == "1.2.0"


@pytest.mark.usefixtures("fake_trtllm")
def test_the_fake_lacks_what_only_later_versions_have() -> None:
    sampler = found_in_fake("tensorrt_llm._torch.pyexecutor.sampler.TorchSampler")

    assert not hasattr(sampler, "PenaltyHandler")
    assert "priority" not in parameters_in_fake(found_in_fake("tensorrt_llm.LLM").generate_async)


def test_the_fake_is_as_recorded_by_its_source_too() -> None:
    report = check_source(FAKES / "tensorrt_llm")

    assert (report.generation, report.differences, report.not_found) == ("1.2", (), ())


@pytest.mark.parametrize(
    ("version", "generation"),
    [
        ("1.2.0rc3", "1.2rc"),
        ("1.2.0rc6.post3", "1.2"),
        ("1.2.1", "1.2"),
        ("1.3.0rc2", "1.3"),
        ("1.4.0rc1", "1.3"),
        ("unknown", "1.2"),
    ],
)
def test_each_version_has_a_generation(version: str, generation: str) -> None:
    assert generation_of(version) == generation


def test_generations_differ_in_what_is_recorded_of_them() -> None:
    candidate, line, later = (load_facts(name) for name in ("1.2rc", "1.2", "1.3"))
    args = "tensorrt_llm.llmapi.TorchLlmArgs"

    assert "build_config" in candidate["classes"][args]["fields"]
    assert "build_config" not in line["classes"][args]["fields"]
    assert "max_stats_len" not in candidate["classes"][args]["fields"]
    assert "tensorrt_llm.llmapi.TrtLlmArgs" not in later["classes"]
    generate = later["classes"]["tensorrt_llm.LLM"]["methods"]["generate_async"]
    assert {"inputs", "priority"} <= set(generate["parameters"])
    statistics = [table["behaviour"]["statistics"]["is"] for table in (candidate, line, later)]
    assert statistics == ["push", "rpc", "rpc"]


def test_a_source_that_is_otherwise_is_found_out(tmp_path: Path) -> None:
    folder = tmp_path / "tensorrt_llm"
    shutil.copytree(FAKES / "tensorrt_llm", folder, ignore=shutil.ignore_patterns("*.pyc"))
    (folder / "version.py").write_text('__version__ = "1.2.1"\n')
    for name, old, new in (
        ("sampling_params.py", "    seed: int | None = None\n", ""),
        ("sampling_params.py", "max_tokens: int | None = 32", "max_tokens: int | None = 64"),
        ("llmapi/llm_args.py", "enable_sleep: bool = False", "enable_sleep: bool = True"),
        ("llmapi/llm.py", "cache_salt: str | None = None,", ""),
        ("executor/result.py", "def mark_undone", "def revive"),
    ):
        file = folder / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
    (folder / "lora_helper.py").unlink()

    report = check_source(folder)

    assert [str(each) for each in report.differences] == [
        "tensorrt_llm.LLM.generate_async(cache_salt): no such parameter",
        "tensorrt_llm.SamplingParams.max_tokens: the default is 64, recorded 32",
        "tensorrt_llm.SamplingParams.seed: there is no such field",
        "tensorrt_llm.llmapi.TorchLlmArgs.enable_sleep: the default is True, recorded False"
        " (was not verified)",
        "tensorrt_llm.llmapi.TrtLlmArgs.enable_sleep: the default is True, recorded False"
        " (was not verified)",
        "tensorrt_llm.executor.result.IterationResult.mark_undone: there is no such method",
    ]
    assert not report.is_as_recorded


def protocols() -> list[ast.ClassDef]:
    tree = ast.parse(source_of("api.py"))
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("protocol", protocols(), ids=lambda node: node.name)
def test_every_member_of_the_protocols_is_recorded(protocol: ast.ClassDef) -> None:
    path = class_path("LLM" if protocol.name == "Llm" else protocol.name)
    assert path is not None, protocol.name
    methods = facts()["classes"][path].get("methods", {})

    for node in protocol.body:
        if isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            assert node.target.id in members_of(path)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(isinstance(by, ast.Name) and by.id == "property" for by in node.decorator_list):
                assert node.name in members_of(path)
                continue
            assert node.name in methods
            names = [item.arg for item in (*node.args.args, *node.args.kwonlyargs)][1:]
            recorded = recorded_parameters(methods[node.name]["parameters"])
            assert set(names) <= set(recorded)
            defaults = [ast.literal_eval(default) for default in node.args.defaults]
            assert defaults == [recorded[name] for name in names[len(names) - len(defaults) :]]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_the_adapter_takes_nothing_from_the_package_that_is_not_recorded(module: Path) -> None:
    source = module.read_text(encoding="utf-8")
    unrecorded = [use for use in uses_of(source) if not use.is_recorded]
    unknown = {name for name in foreign_class_names(source) if class_path(name) is None}

    assert unrecorded == []
    assert unknown - OWN_CLASSES == set()


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_every_keyword_for_the_packages_classes_is_recorded(module: Path) -> None:
    source = module.read_text(encoding="utf-8")
    made_up = [
        (callee, keyword, line)
        for callee, keyword, line in keywords_by_callee(source)
        if callee in CALLEES and keyword not in parameters_of(CALLEES[callee])
    ]

    assert made_up == []


@pytest.mark.parametrize("name", sorted(OWN_WORDS))
def test_every_name_in_quotes_is_recorded(name: str) -> None:
    """Arguments are collected in dictionaries by name: each name must be in the table."""
    assert words_of(source_of(name)) - all_names() - OWN_WORDS[name] == set()


def test_every_key_of_the_statistics_is_recorded() -> None:
    words = words_of(source_of("stats.py"))

    assert words - statistics_keys() - all_names() - {"pushed"} == set()
    assert "freeNumBlocks" in words


@pytest.mark.parametrize("name", ["engine_build.py", "builder_process.py"])
def test_every_flag_of_the_builder_is_recorded(name: str) -> None:
    recorded = {*facts()["commands"]["trtllm-build"]["flags"], "help"}

    assert flags_of(source_of(name)) - recorded == set()
