"""The code blocks of pages are valid. Commands and data files parse, and Python code compiles and
imports only what exists.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import tomllib
from pathlib import Path

import pytest
import yaml

from markdown_source import Block, blocks
from page_commands import Command, commands
from penstock.server.cli.serve import merge_settings
from penstock.server.settings.sources import BadSetting
from penstock.tools.command_line import build_parser
from support.pages import markdown_pages, page_id

PAGES = markdown_pages()
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


# --- commands


def wrong_command(words: tuple[str, ...]) -> str | None:
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


# --- Python


def wrong_imports(tree: ast.AST) -> list[str]:
    """Return the imported modules that do not exist, and the imported names of penstock that do not
    exist. Modules of other packages that are not installed are ignored.
    """
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


# --- files


@pytest.mark.parametrize("page", pages_with("json", "yaml", "yml", "toml"), ids=page_id)
def test_files_parse(page: Path) -> None:
    for block in blocks_in(page, "json"):
        json.loads(block.text)
    for block in blocks_in(page, "yaml", "yml"):
        list(yaml.safe_load_all(block.text))
    for block in blocks_in(page, "toml"):
        tomllib.loads(block.text)
