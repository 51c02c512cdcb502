"""Compares recorded facts about TensorRT-LLM's API with the source of one version.

Parses the source without importing it, so it works on a checkout or an installed package without a
GPU. The fact tables in `facts/` cover release 1.2, and how its release candidates and 1.3 differ
from it.

    python -m penstock.executor.trtllm.source_check --source DIR

DIR contains `tensorrt_llm/`. The exit code is 1 if an entry differs that was verified in the source
of some version.
"""

import argparse
import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

_FACTS: Final = Path(__file__).with_name("facts")
RELEASE: Final = "1.2"
_GENERATIONS: Final = (RELEASE, "1.2rc", "1.3")
_GROUPS: Final = ("fields", "attributes", "methods")

_FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "LLM": ("llmapi/llm.py",),
    "SamplingParams": ("sampling_params.py",),
    "GuidedDecodingParams": ("sampling_params.py",),
    "LoRARequest": ("executor/request.py",),
    "RequestOutput": ("llmapi/llm.py", "executor/result.py"),
    "CompletionOutput": ("executor/result.py",),
    "Logprob": ("executor/result.py",),
    "IterationResult": ("executor/result.py",),
    "GenerationExecutorProxy": ("executor/proxy.py",),
    "LoraConfig": ("lora_helper.py", "_torch/peft/lora/config.py"),
    "TorchSampler": (
        "_torch/pyexecutor/sampler.py",
        "_torch/pyexecutor/sampler/sampler.py",
    ),
    "TRTLLMSampler": (
        "_torch/pyexecutor/sampler.py",
        "_torch/pyexecutor/sampler/sampler.py",
    ),
    "RequestError": ("executor/utils.py",),
}
"""For each class, the source files that may define it, relative to `tensorrt_llm`; all other
classes are settings, in `_SETTINGS`.
"""
_SETTINGS: Final = ("llmapi/llm_args.py",)
_OTHER_FOLDERS: Final = ("llmapi", "executor", ".")
"""Folders to search for a class that its usual files do not define."""
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "LLM": ("_TorchLLM", "BaseLLM", "LLM"),
    "RequestOutput": (
        "RequestOutput",
        "DetokenizedGenerationResultBase",
        "GenerationResult",
        "GenerationResultBase",
    ),
}
"""For a class of the table, the source classes whose members together form it. Members of base
classes in the same file are included for every class.
"""
_INHERITED: Final = {"model_fields"}
"""Members that classes inherit from other packages, so that they are not in this source."""
_NATIVE: Final = ("binding", "enum")
"""Kinds of entries that are defined in native code and therefore not compared."""

_MAX_SHOWN: Final = 10
_FACTORY: Final = "a factory"
_REQUIRED: Final = "required"


@dataclass(frozen=True, slots=True)
class Difference:
    """One recorded entry that the source contradicts. `where`: its dotted name; `what`: the
    difference; `is_verified`: the entry was verified in the source of some version.
    """

    where: str
    what: str
    is_verified: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + ("" if self.is_verified else " (was not verified)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """The differences between a source tree and a table of facts. `not_found`: the classes not
    found in the tree. `generation`: the table's name; see `generation_of`.
    """

    generation: str
    differences: tuple[Difference, ...]
    not_found: tuple[str, ...]

    @property
    def is_as_recorded(self) -> bool:
        """True if the source differs in no entry that was verified in the source of a version."""
        return not any(each.is_verified for each in self.differences)

    @property
    def summary(self) -> str:
        """One line with the generation, at most 10 differences, and the classes not found."""
        found = [f"as recorded of generation {self.generation}"]
        if self.differences:
            found = [f"not as recorded of generation {self.generation}"]
            found += map(str, self.differences[:_MAX_SHOWN])
            found += ["..."] if len(self.differences) > _MAX_SHOWN else []
        if self.not_found:
            found.append(f"classes not found: {', '.join(self.not_found)}")
        return "; ".join(found)


def load_facts(generation: str = RELEASE) -> dict[str, Any]:
    """Return the table of facts about TensorRT-LLM for `generation` (see `generation_of`): the
    table of release 1.2 with the changes in the generation's file applied.
    """
    table = _table(RELEASE)
    if generation == RELEASE:
        return table
    other = _table(generation)
    for path in other["absent"]:
        _remove(table["classes"], path)
    for path, entry in other["classes"].items():
        _merge(table["classes"].setdefault(path, {}), entry)
    table["behaviour"] |= other["behaviour"]
    return table | {"generation": generation}


def generation_of(version: str) -> str:
    """Return which table of facts applies to a version of TensorRT-LLM: "1.3" for releases after
    1.2, "1.2rc" for release candidates 0 to 5 of 1.2 or earlier, else "1.2", also if the version
    cannot be parsed.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(rc[0-5]\b)?", version)
    if found is None:
        return RELEASE
    if (int(found[1]), int(found[2])) > (1, 2):
        return "1.3"
    return "1.2rc" if found[3] else RELEASE


def check_source(folder: Path, generation: str = "") -> SourceReport:
    """Compare the package's source in `folder` (.../tensorrt_llm) with a table of facts.

    `generation`: which table, see `generation_of`; "": the table for the version given in the
    source.
    """
    tree = _Tree(folder)
    generation = generation or generation_of(tree.version())
    differences: list[Difference] = []
    not_found: list[str] = []
    for path, entry in load_facts(generation)["classes"].items():
        if entry["kind"] in _NATIVE or "._tensorrt_engine" in path:
            continue
        found = tree.find(path.rpartition(".")[2])
        if found is None:
            not_found.append(path)
        else:
            differences += _differences(path, entry, found)
    return SourceReport(
        generation=generation, differences=tuple(differences), not_found=tuple(not_found)
    )


def check_installed() -> SourceReport | None:
    """Return the report of `check_source` for the installed package, without importing the package;
    None if it is not installed.
    """
    spec = importlib.util.find_spec("tensorrt_llm")
    if spec is None or spec.origin is None:
        return None
    return check_source(Path(spec.origin).parent)


def _table(generation: str) -> dict[str, Any]:
    text = (_FACTS / f"{generation}.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def _remove(classes: dict[str, Any], path: str) -> None:
    owner, _, name = path.rpartition(".")
    if classes.pop(path, None) is None:
        for group in _GROUPS:
            classes.get(owner, {}).get(group, {}).pop(name, None)


def _merge(entry: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        known = entry.get(name)
        if isinstance(value, dict) and isinstance(known, dict) and "default" not in value:
            _merge(cast("dict[str, Any]", known), cast("dict[str, Any]", value))
        else:
            entry[name] = value


class _Found:
    """The members of a class and of its bases in the same file. `fields`: default values, as
    `_literal` returns them; `names`: all names of members and nested definitions.
    """

    def __init__(self) -> None:
        self.fields: dict[str, object] = {}
        self.names: set[str] = set()
        self.methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}

    def add(self, node: ast.ClassDef) -> None:
        """Add the members of `node` that are not present yet; call it for a derived class before
        its bases.
        """
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                self.names.add(item.target.id)
                if "ClassVar" not in ast.unparse(item.annotation):
                    self.fields.setdefault(item.target.id, _literal(item.value))
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                self.methods.setdefault(item.name, item)
        for inner in ast.walk(node):
            match inner:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self.names.add(inner.name)
                case ast.Attribute(value=ast.Name(id="self")):
                    self.names.add(inner.attr)
                case ast.Assign(targets=[ast.Name(id=name)]):
                    self.names.add(name)
                case _:
                    pass


class _Tree:
    """The classes of a source tree, parsed when needed. `folder`: .../tensorrt_llm."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._classes = cache(self._read)

    def version(self) -> str:
        for name in ("version.py", "__init__.py"):
            file = self._folder / name
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            if found := re.search(r"^__version__\s*=\s*[\"']([^\"']+)", text, re.MULTILINE):
                return found[1]
        return RELEASE

    def find(self, name: str) -> _Found | None:
        """Return the members of a class and of its `_PARTS`; None if it is not found."""
        files = [self._folder / each for each in _FILES.get(name, _SETTINGS)]
        parts = _PARTS.get(name, (name,))
        for file in (*files, *self._others()):
            if not any(part in self._classes(file) for part in parts):
                continue
            found = _Found()
            for each in {file: None, **dict.fromkeys(files)}:
                for part in parts:
                    self._add(found, each, part)
            return found
        return None

    def _add(self, found: _Found, file: Path, name: str) -> None:
        node = self._classes(file).get(name)
        if node is None:
            return
        found.add(node)
        for base in node.bases:
            # Looked up by its bare name: a class of another module is not found.
            if (base_name := ast.unparse(base).rpartition(".")[2]) != name:
                self._add(found, file, base_name)

    def _others(self) -> Iterator[Path]:
        for folder in _OTHER_FOLDERS:
            yield from sorted((self._folder / folder).glob("*.py"))

    def _read(self, file: Path) -> dict[str, ast.ClassDef]:
        if not file.is_file():
            return {}
        tree = ast.parse(file.read_text(encoding="utf-8"))
        return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _differences(path: str, entry: Mapping[str, Any], found: _Found) -> Iterator[Difference]:
    for name, fact in entry.get("fields", {}).items():
        where = f"{path}.{name}"
        if name not in found.fields and name not in found.names:
            yield Difference(where, "there is no such field", fact["verified"])
        elif name in found.fields and not _is_same(fact["default"], found.fields[name]):
            text = f"the default is {found.fields[name]!r}, recorded {fact['default']!r}"
            yield Difference(where, text, fact["verified"])
    for name, fact in entry.get("attributes", {}).items():
        if name not in found.names | _INHERITED:
            yield Difference(f"{path}.{name}", "there is no such attribute", fact["verified"])
    for name, fact in entry.get("methods", {}).items():
        method = found.methods.get(name)
        if method is None:
            yield Difference(f"{path}.{name}", "there is no such method", fact["verified"])
            continue
        yield from _method_differences(f"{path}.{name}", fact, method)


def _method_differences(
    where: str, fact: Mapping[str, Any], method: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Difference]:
    given = _parameters(method.args)
    is_open = method.args.kwarg is not None
    for name, parameter in fact["parameters"].items():
        if name not in given:
            if not is_open:
                yield Difference(f"{where}({name})", "no such parameter", parameter["verified"])
        elif not _is_same(parameter["default"], given[name]):
            text = f"the default is {given[name]!r}, recorded {parameter['default']!r}"
            yield Difference(f"{where}({name})", text, parameter["verified"])
    if "is_coroutine" in fact and fact["is_coroutine"] != isinstance(method, ast.AsyncFunctionDef):
        yield Difference(where, "is a coroutine in only one of the two", fact["verified"])


def _parameters(arguments: ast.arguments) -> dict[str, object]:
    named = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(named) - len(arguments.defaults))
    pairs = [
        *zip(named, [*missing, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {item.arg: _literal(default) for item, default in pairs if item.arg != "self"}


def _literal(node: ast.expr | None) -> object:
    """Return a default value of the source in the form that the table of facts has: a literal,
    `_REQUIRED`, `_FACTORY` or the last name of an expression.
    """
    if node is None:
        return _REQUIRED
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].lower() == "field":
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "default" in given:
            return _literal(given["default"])
        if "default_factory" in given:
            return _FACTORY
        return _literal(node.args[0]) if node.args else _REQUIRED
    if isinstance(node, ast.BinOp):
        return _product(node)
    try:
        value: object = ast.literal_eval(node)
    except ValueError:
        return _FACTORY if isinstance(node, ast.Call) else ast.unparse(node).rpartition(".")[2]
    return value


def _product(node: ast.BinOp) -> object:
    """Return the value of a product or power of two integer literals, such as `2 * 1024`; for any
    other expression, its source text.
    """
    match node:
        case ast.BinOp(ast.Constant(int() as left), ast.Pow(), ast.Constant(int() as right)):
            return left ** min(right, 64)
        case ast.BinOp(ast.Constant(int() as left), ast.Mult(), ast.Constant(int() as right)):
            return left * right
        case _:
            return ast.unparse(node)


def _is_same(recorded: object, real: object) -> bool:
    if real == "..." or real is ...:
        real = _REQUIRED
    if isinstance(recorded, dict):
        return real == _REQUIRED if "required" in recorded else real in (_FACTORY, [], {}, ())
    # One side writes enum members by value, the other by name.
    return recorded == real or str(recorded).lower() == str(real).lower()


def main() -> int:
    """Run as a program: compare the source in --source, print the differences, and return the exit
    code.
    """
    parser = argparse.ArgumentParser(prog="source_check", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="folder that has tensorrt_llm/")
    parser.add_argument("--generation", choices=_GENERATIONS, default="", help="default: its own")
    options = parser.parse_args()
    report = check_source(options.source / "tensorrt_llm", options.generation)
    for difference in report.differences:
        print(difference)
    print(f"generation {report.generation}; not found: {', '.join(report.not_found) or 'nothing'}")
    return 0 if report.is_as_recorded else 1


if __name__ == "__main__":
    raise SystemExit(main())
