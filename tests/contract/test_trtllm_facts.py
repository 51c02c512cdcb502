"""The recorded API of TensorRT-LLM covers what the adapter uses and what the stand-in has.

The package cannot be installed for tests. Instead, adapter and stand-in agree with one table, which
records the source of every entry. The stand-in's settings classes are built from the table, so they
reject keywords that are not recorded.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.executor.trtllm import api, package, source_check
from penstock.executor.trtllm.source_check import check_source, generation_of, load_facts
from support.trtllm_facts import all_names, class_paths, facts, members_of, of_release_1_2

ADAPTER = Path(package.__file__).parent
OWN_WORDS = {
    "llm_args.py": set[str](),
    # Fields of our own requests, which error messages name.
    "request_mapping.py": {"constraint", "retention", "none"},
    "stats.py": {"pushed"},
}
"""Modules that use the package's names as string constants, and the constants that are our own."""
FOREIGN_CLASS = re.compile(r"[A-Z]\w*(Config|Policy|Params|Request|Sampler|Args)")
OWN_CLASSES = {"SubmittedRequest"}
CLASSES = sorted(facts()["classes"])


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


def as_recorded(default: Any) -> Any:
    """Return a default value as it is written in the table."""
    if default is inspect.Parameter.empty:
        return {"required": True}
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "factory"
    return default.value if isinstance(default, enum.Enum) else default


def recorded_defaults(entries: dict[str, Any]) -> dict[str, Any]:
    defaults = {name: entry["default"] for name, entry in of_release_1_2(entries).items()}
    return {
        name: "factory" if isinstance(default, dict) and "factory" in default else default
        for name, default in defaults.items()
    }


def defaults_of(function: Any) -> dict[str, Any]:
    return {
        item.name: as_recorded(item.default)
        for item in inspect.signature(function).parameters.values()
        if item.kind is not item.VAR_KEYWORD and item.name != "self"
    }


@pytest.mark.usefixtures("fake_trtllm")
@pytest.mark.parametrize("path", CLASSES)
def test_the_fake_has_the_recorded_fields_methods_and_defaults(path: str) -> None:
    record, made = facts()["classes"][path], found_in_fake(path)

    if "fields" in record:
        assert defaults_of(made) == recorded_defaults(record["fields"])
    if record["kind"] == "model":
        assert list(made.model_fields) == list(defaults_of(made))
    if record["kind"] == "enum":
        assert [member.name for member in made] == record["members"]
    if record["kind"] == "exception":
        assert issubclass(made, RuntimeError)
    for name, method in record.get("methods", {}).items():
        if not hasattr(made, name):
            continue
        function = getattr(made, name)
        assert defaults_of(function) == recorded_defaults(method["parameters"]), name
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
    # Nested in the class by later versions.
    sampler = found_in_fake("tensorrt_llm._torch.pyexecutor.sampler.TorchSampler")
    assert not hasattr(sampler, "PenaltyHandler")


def source(folder: Path) -> Path:
    """Write a source tree with the recorded classes, and with their members in base classes; return
    its folder.
    """
    texts: dict[str, str] = {"version.py": '__version__ = "1.2.1"\n'}
    for path, entry in load_facts()["classes"].items():
        name = path.rpartition(".")[2]
        lines = [f"class Base{name}:", f"    {name} = 1"]
        for field, fact in entry.get("fields", {}).items():
            default = fact["default"]
            written = f" = {default!r}"
            if isinstance(default, dict):
                written = "" if "required" in default else " = Field(default_factory=list)"
            lines.append(f"    {field}: Any{written}")
        lines += [f"    {attribute} = None" for attribute in entry.get("attributes", {})]
        for method, fact in entry.get("methods", {}).items():
            given = {name: item["default"] for name, item in fact["parameters"].items()}
            parameters = [
                name if isinstance(default, dict) else f"{name}={default!r}"
                for name, default in given.items()
            ]
            kind = "async def" if fact.get("is_coroutine") else "def"
            lines.append(f"    {kind} {method}({', '.join(['self', *parameters])}): ...")
        file = source_check._FILES.get(name, source_check._SETTINGS)[0]
        lines.append(f"class {name}(Base{name}): ...")
        if "._tensorrt_engine" not in path:
            texts[file] = texts.get(file, "") + "\n".join(lines) + "\n"
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def test_a_source_tree_as_recorded_has_no_differences(tmp_path: Path) -> None:
    report = check_source(source(tmp_path))

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
def test_each_version_belongs_to_a_recorded_generation(version: str, generation: str) -> None:
    assert generation_of(version) == generation


def test_recorded_generations_differ_where_the_releases_do() -> None:
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


def test_a_source_tree_with_differences_is_reported(tmp_path: Path) -> None:
    folder = source(tmp_path)
    for name, old, new in (
        ("sampling_params.py", "    seed: Any = None\n", ""),
        ("sampling_params.py", "max_tokens: Any = 32", "max_tokens: Any = 64"),
        ("llmapi/llm_args.py", "enable_sleep: Any = False", "enable_sleep: Any = True"),
        ("llmapi/llm.py", ", cache_salt=None", ""),
        ("executor/result.py", "def mark_undone", "def revive"),
    ):
        file = folder / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
    # Found in another module of one of the folders.
    (folder / "lora_helper.py").rename(folder / "llmapi/llm_configs.py")

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


PROTOCOLS = [kind for kind in vars(api).values() if getattr(kind, "__module__", "") == api.__name__]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda kind: kind.__name__)
def test_every_member_of_the_protocols_is_recorded(protocol: Any) -> None:
    path = class_paths("LLM" if protocol is api.Llm else protocol.__name__)[0]
    methods = facts()["classes"][path].get("methods", {})
    own = {
        name: member
        for name, member in {**protocol.__annotations__, **vars(protocol)}.items()
        if name == "__aiter__" or not name.startswith(("__", "_abc", "_is_"))
    }

    assert own.keys() <= members_of(path)
    for name, member in own.items():
        if inspect.isfunction(member):
            recorded = recorded_defaults(methods[name]["parameters"])
            assert defaults_of(member).items() <= recorded.items()


@pytest.mark.usefixtures("fake_trtllm")
def test_the_adapter_takes_only_recorded_names_from_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the adapter's module `package` imports the vendor's package."""
    taken: list[tuple[str, str]] = []

    class Watched(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            path = super().__getattribute__("__name__")
            taken.append((path, name))
            return getattr(importlib.import_module(path), name)

    monkeypatch.setattr(package, "import_module", lambda name: Watched(name))
    package.load_package()
    package.load_package(is_engine=True)

    modules = facts()["modules"]
    assert len(taken) > 10
    assert [(path, name) for path, name in taken if name not in modules[path]["names"]] == []


def words_of(module: str) -> set[str]:
    """Return the string constants in a module of the adapter, without docstrings."""
    tree = ast.parse((ADAPTER / module).read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    }


@pytest.mark.parametrize("module", sorted(OWN_WORDS))
def test_every_name_in_quotes_is_recorded(module: str) -> None:
    """Arguments are collected in dictionaries by name, and each name must be in the table."""
    names = {word for word in words_of(module) if word.isidentifier()}

    assert names
    assert names - all_names() - OWN_WORDS[module] == set()


def test_every_class_in_quotes_is_recorded() -> None:
    words = {word for path in ADAPTER.glob("*.py") for word in words_of(path.name)}
    named = {word for word in words if FOREIGN_CLASS.fullmatch(word)}

    assert {name for name in named if not class_paths(name)} == OWN_CLASSES


@pytest.mark.parametrize("module", ["engine_build.py", "builder_process.py"])
def test_every_flag_of_the_builder_is_recorded(module: str) -> None:
    flags = {word[2:] for word in words_of(module) if re.fullmatch(r"--\w+", word)}

    assert flags - {*facts()["commands"]["trtllm-build"]["flags"], "help"} == set()
