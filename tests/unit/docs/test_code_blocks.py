"""The code blocks of pages are valid: commands parse, code compiles, files parse."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from google.protobuf import json_format
from google.protobuf.descriptor import FileDescriptor

import penstock.v1 as pb
from markdown_source import Block, blocks
from penstock.server.cli.serve import merge_settings
from penstock.server.settings.sources import BadSetting
from penstock.tools.command_line import build_parser
from support.page_commands import Command, commands, spans, split_command
from support.pages import REPOSITORY, markdown_pages, page_id

PAGES = markdown_pages()
# Languages of blocks that are shown and not checked here.
SHOWN = {"", "text", "mermaid", "diff", "promql", "dockerfile", "make", "cmake", "html", "css"}
FOREIGN = {"cpp", "c++", "go", "java", "javascript", "js", "typescript", "ts", "rust", "csharp"}
CHECKED = {"python", "json", "jsonc", "yaml", "yml", "toml", "sh", "bash", "console", "shell"}
PARSER = build_parser()
SUBPARSERS = {
    name: parser.filled()
    for action in PARSER._actions
    if isinstance(action.choices, dict)
    for name, parser in action.choices.items()
}


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks_in(page: Path, *languages: str) -> list[Block]:
    return [block for block in blocks(read(page)) if block.language in languages]


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if blocks_in(page, *languages)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_are_of_languages_that_somebody_checks(page: Path) -> None:
    known = SHOWN | FOREIGN | CHECKED | {"proto", "protobuf"}

    assert {block.language for block in blocks(read(page))} <= known


# --- commands


def wrong_command(words: tuple[str, ...]) -> str | None:
    """Return what is wrong with a call of `penstock`; None if nothing."""
    arguments = tuple(word for word in words[1:] if word != "...")  # whatever else you need
    if not arguments or arguments[0].startswith("-"):
        return None if arguments in {(), ("--help",), ("-h",)} else f"no such option: {arguments}"
    subparser = SUBPARSERS.get(arguments[0])
    if subparser is None:
        return f"no such command: {arguments[0]}"
    own, _, passed_on = _at_double_dash(arguments[1:])
    wrong = _unknown_option(own, subparser._option_string_actions)
    if wrong is None and passed_on:
        wrong = _unknown_option(passed_on, SUBPARSERS["serve"]._option_string_actions)
    if wrong is not None or {"-h", "--help"} & set(own):
        return wrong
    try:
        parsed = vars(PARSER.parse_args(list(arguments)))
        if arguments[0] == "serve":
            files = ("config", "step_cost", "simulated_config", "trtllm_config")
            merge_settings(parsed | dict.fromkeys(files), {})
    except (SystemExit, BadSetting):
        return f"does not parse: {' '.join(words)}"
    return None


def _at_double_dash(words: tuple[str, ...]) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    if "--" not in words:
        return words, "", ()
    place = words.index("--")
    return words[:place], "--", words[place + 1 :]


def _unknown_option(words: tuple[str, ...], known: object) -> str | None:
    # argparse takes beginnings of options too: a page gives them whole.
    assert isinstance(known, dict)
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [name for name in names if name not in known]
    return f"no such option: {unknown}" if unknown else None


def is_ours(command: Command) -> bool:
    program = command.words[0].rpartition("/")[2]
    return program == "penstock" or command.words[1:3] == ("-m", "penstock.tools")


def penstock_words(command: Command) -> tuple[str, ...]:
    if command.words[1:3] == ("-m", "penstock.tools"):
        return ("penstock", *command.words[3:])
    return ("penstock", *command.words[1:])


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_ours_parse(page: Path) -> None:
    wrong = {
        f"line {command.line}": reason
        for command in commands(read(page))
        if is_ours(command) and (reason := wrong_command(penstock_words(command)))
    }

    assert wrong == {}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_within_the_text_name_what_there_is(page: Path) -> None:
    wrong: dict[str, str] = {}
    for span in spans(read(page)):
        if not span.startswith("penstock ") or "|" in span or "..." in span:
            continue
        words = split_command(span)
        subparser = SUBPARSERS.get(words[1])
        if subparser is None:
            if not words[1].isupper() and words[1] != "--help":
                wrong[span] = "no such command"
        elif reason := _unknown_option(
            _at_double_dash(words[2:])[0], subparser._option_string_actions
        ):
            wrong[span] = reason

    # "penstock ready on ..." is the service's output.
    assert {span: why for span, why in wrong.items() if not span.startswith("penstock ready")} == {}


# --- calls by reflection


def wrong_call(words: tuple[str, ...]) -> str | None:
    """Return what is wrong with a call of a tool such as grpcurl; None if nothing or not ours."""
    target = words[-1].replace(".", "/").rsplit("/", 2)
    if not words[-1].startswith("penstock.v1.") or len(target) < 3:
        return None
    service = pb.__dict__.get(f"{target[1]}Stub")
    found = [
        method
        for file in _files()
        for descriptor in file.services_by_name.values()
        for method in descriptor.methods
        if (descriptor.name, method.name) == (target[1], target[2])
    ]
    if service is None or not found:
        return f"no such method: {words[-1]}"
    if "-d" in words and (data := words[words.index("-d") + 1]) not in {"@", ""}:
        try:
            json_format.Parse(data, getattr(pb, found[0].input_type.name)())
        except json_format.ParseError as error:
            return str(error)
    return None


def _files() -> list[FileDescriptor]:
    pool = pb.GenerateRequest.DESCRIPTOR.file.pool
    paths = (REPOSITORY / "protos/penstock/v1").glob("*.proto")
    return [pool.FindFileByName(f"penstock/v1/{path.name}") for path in paths]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_calls_by_reflection_name_what_there_is(page: Path) -> None:
    programs = {"grpcurl", "grpcui", "evans"}
    wrong = {
        f"line {command.line}": reason
        for command in commands(read(page))
        if command.words[0].rpartition("/")[2] in programs and (reason := wrong_call(command.words))
    }

    assert wrong == {}


# --- Python


def wrong_imports(tree: ast.AST) -> list[str]:
    """Return imports of our or installed modules that do not exist."""
    wrong: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wrong += [alias.name for alias in node.names if not _is_module(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if not _is_module(node.module):
                wrong.append(node.module)
            elif node.module.partition(".")[0] == "penstock":
                module = importlib.import_module(node.module)
                wrong += [
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and not _is_module(f"{node.module}.{alias.name}")
                ]
    return wrong


def _is_module(name: str) -> bool:
    if name.partition(".")[0] != "penstock" and not importlib.util.find_spec(name.split(".")[0]):
        return True  # a program of others that is not installed here
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", pages_with("python"), ids=page_id)
def test_python_compiles_and_imports_what_there_is(page: Path) -> None:
    for block in blocks_in(page, "python"):
        where = f"{page_id(page)}:{block.line}"
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(block.text, where, "exec", flags)

        assert isinstance(tree, ast.Module)
        assert wrong_imports(tree) == [], where


# --- the contract


def wrong_fields(proto: str) -> list[str]:
    """Return fields of our messages that do not exist or have another number."""
    wrong: list[str] = []
    for name, body in re.findall(r"^message (\w+) \{(.*?)^\}", proto, re.M | re.S):
        message = getattr(pb, name, None)
        known = {} if message is None else message.DESCRIPTOR.fields_by_name
        for field, number in re.findall(r"(\w+) = (\d+)", body):
            if field not in known or known[field].number != int(number):
                wrong.append(f"{name}.{field}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pieces_of_the_contract_are_as_it_is(page: Path) -> None:
    texts = [block.text for block in blocks_in(page, "proto", "protobuf")]

    assert [field for text in texts for field in wrong_fields(text)] == []


# --- files


@pytest.mark.parametrize("page", pages_with("json", "yaml", "yml", "toml"), ids=page_id)
def test_files_parse(page: Path) -> None:
    for block in blocks_in(page, "json"):
        json.loads(block.text)
    for block in blocks_in(page, "yaml", "yml"):
        list(yaml.safe_load_all(block.text))
    for block in blocks_in(page, "toml"):
        tomllib.loads(block.text)
