"""Generates docs/contract.md, the API reference, from protos/ and their comments.

Usage: `python docs/tools/contract_page.py`; `--check` only reports whether the page is current
(exit code 1: it is not).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    ServiceDescriptorProto,
)

from comment_text import CommentWriter
from proto_image import (
    ENUM,
    FIELD_OF_MESSAGE,
    MESSAGE,
    METHOD_OF_SERVICE,
    PACKAGE,
    REPOSITORY,
    SERVICE,
    SYNTAX,
    VALUE_OF_ENUM,
    CommentedFile,
    find_buf,
    read_contract,
)

PAGE = REPOSITORY / "docs" / "contract.md"
# The order of the files on the page, most important first. `_in_order` raises an error for a file
# that is not listed.
_TITLES = {
    "generation_service.proto": "Generating",
    "prompt.proto": "Prompts",
    "options.proto": "Options",
    "output.proto": "Output",
    "state.proto": "States",
    "error.proto": "Failures",
    "model_service.proto": "Finding out about models",
    "model.proto": "Models",
    "operations_service.proto": "Operating",
    "stats.proto": "Figures",
}
_INTRODUCTION = """\
<!-- Generated from protos/ by docs/tools/contract_page.py; run `make pages` to update. -->

# Contract

Package `{package}`: every service, message and field, with the comments of the `.proto` files in
[protos/](../protos/README.md), from which this page is made. Those files are what stubs are
generated from, and what compatibility is checked against.

How to read the tables: *optional* fields distinguish unset from zero; of the fields that
are *one of* a group at most one is set. The number of a field is in the first column.

| service | what it does |
|---|---|
{services}
"""


class PageWriter:
    """Renders messages, enums and services of the proto files as sections of the page."""

    def __init__(self, files: Sequence[CommentedFile]) -> None:
        self._files = _in_order(files)
        self._text = CommentWriter(anchors=frozenset(_anchors(self._files)))

    def page(self) -> str:
        """Return the page, in Markdown. Raises ValueError for a message with nested types."""
        parts = [_INTRODUCTION.format(package=PACKAGE, services="\n".join(self._service_rows()))]
        for file in self._files:
            parts += self._file(file)
        return "\n".join(part.rstrip("\n") + "\n" for part in parts)

    def _service_rows(self) -> Iterator[str]:
        for file in self._files:
            for index, service in enumerate(file.descriptor.service):
                comment = file.comment(SERVICE, index).split("\n\n")[0]
                yield f"| {self._text.link(service.name)} | {self._text.cell(comment)} |"

    def _file(self, file: CommentedFile) -> Iterator[str]:
        yield f"## {_TITLES[file.name]}"
        yield f"`{file.descriptor.name}`. {self._text.blocks(file.comment(SYNTAX))}"
        for index, service in enumerate(file.descriptor.service):
            yield from self._service(file, index, service)
        for index, message in enumerate(file.descriptor.message_type):
            yield from self._message(file, index, message)
        for index, enum in enumerate(file.descriptor.enum_type):
            yield from self._enum(file, index, enum)

    def _service(
        self, file: CommentedFile, index: int, service: ServiceDescriptorProto
    ) -> Iterator[str]:
        yield _heading(service.name)
        yield self._text.blocks(file.comment(SERVICE, index))
        yield _table("call", "takes", "answers", "") + "\n".join(
            f"| {_anchor(f'{service.name}.{method.name}')}`{method.name}` "
            f"| {'stream of ' * method.client_streaming}{self._type_link(method.input_type)} "
            f"| {'stream of ' * method.server_streaming}{self._type_link(method.output_type)} "
            f"| {self._text.cell(file.comment(SERVICE, index, METHOD_OF_SERVICE, number))} |"
            for number, method in enumerate(service.method)
        )

    def _message(self, file: CommentedFile, index: int, message: DescriptorProto) -> Iterator[str]:
        if message.nested_type or message.enum_type:
            raise ValueError(f"{message.name}: the page has no form for nested types")
        yield _heading(message.name)
        yield self._text.blocks(file.comment(MESSAGE, index))
        if not message.field:
            yield "No fields."
            return
        yield _table("", "field", "type", "") + "\n".join(
            f"| {field.number} | {_anchor(f'{message.name}.{field.name}')}`{field.name}` "
            f"| {self._field_type(message, field)} "
            f"| {self._text.cell(file.comment(MESSAGE, index, FIELD_OF_MESSAGE, number))} |"
            for number, field in enumerate(message.field)
        )

    def _enum(self, file: CommentedFile, index: int, enum: EnumDescriptorProto) -> Iterator[str]:
        yield _heading(enum.name)
        yield self._text.blocks(file.comment(ENUM, index))
        yield _table("", "value", "") + "\n".join(
            f"| {value.number} | {_anchor(value.name)}`{value.name}` "
            f"| {self._text.cell(file.comment(ENUM, index, VALUE_OF_ENUM, number))} |"
            for number, value in enumerate(enum.value)
        )

    def _field_type(self, message: DescriptorProto, field: FieldDescriptorProto) -> str:
        words: list[str] = []
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            words.append("list of")
        elif field.proto3_optional:
            words.append("optional")
        words.append(
            self._type_link(field.type_name)
            if field.type_name
            else f"`{FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
        )
        if field.HasField("oneof_index") and not field.proto3_optional:
            words.append(f"<br>one of `{message.oneof_decl[field.oneof_index].name}`")
        if field.options.deprecated:
            words.append("<br>deprecated")
        return " ".join(words)

    def _type_link(self, full_name: str) -> str:
        return self._text.link(full_name.removeprefix(".").removeprefix(f"{PACKAGE}."))


def _in_order(files: Sequence[CommentedFile]) -> list[CommentedFile]:
    names = {file.name for file in files}
    if names != set(_TITLES):
        raise ValueError(f"no place on the page, or no file: {sorted(names ^ set(_TITLES))}")
    return sorted(files, key=lambda file: list(_TITLES).index(file.name))


def _anchors(files: Sequence[CommentedFile]) -> Iterator[str]:
    for file in files:
        for service in file.descriptor.service:
            yield service.name
            yield from (f"{service.name}.{method.name}" for method in service.method)
        for message in file.descriptor.message_type:
            yield message.name
            yield from (f"{message.name}.{field.name}" for field in message.field)
        for enum in file.descriptor.enum_type:
            yield enum.name
            yield from (value.name for value in enum.value)


def _heading(name: str) -> str:
    # Headings get lower-case anchors; links use the name unchanged.
    return f"{_anchor(name)}\n\n### {name}"


def _anchor(name: str) -> str:
    return f'<a id="{name}"></a>'


def _table(*heads: str) -> str:
    return f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"


def contract_page(buf: str, protos: Path = REPOSITORY / "protos") -> str:
    """Return the page for the files below `protos`, compiled by the program at the path `buf`.
    Raises CalledProcessError if they do not compile; ValueError if the page has no section for one
    of them, or if a message has nested types.
    """
    return PageWriter(read_contract(buf, protos)).page()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or only check it; return the exit code: 1 for a stale page, 2 without buf."""
    parser = argparse.ArgumentParser(description="Write docs/contract.md from protos/.")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    args = parser.parse_args(argv)
    buf = find_buf()
    if buf is None:
        print("buf is needed: pip install buf-bin", file=sys.stderr)
        return 2
    page = contract_page(buf)
    if args.check:
        if page == PAGE.read_text(encoding="utf-8"):
            return 0
        print(f"{PAGE} is stale: run {Path(__file__).name}", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
