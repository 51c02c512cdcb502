"""Compiles the proto files with buf, and looks up the comments of their elements."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "penstock.v1"

# Numbers of fields of descriptor.proto: the location of a comment is a path of field numbers and
# indexes.
SYNTAX = 12
MESSAGE, ENUM, SERVICE = 4, 5, 6
FIELD_OF_MESSAGE, VALUE_OF_ENUM, METHOD_OF_SERVICE = 2, 2, 2

PathInFile = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommentedFile:
    """One proto file, and its comments by the path of the element that each describes."""

    descriptor: FileDescriptorProto
    comments: Mapping[PathInFile, str]

    @property
    def name(self) -> str:
        """The file's name without its folder, e.g. "prompt.proto"."""
        return Path(self.descriptor.name).name

    def comment(self, *path: int) -> str:
        """Return the comment before the element at `path`, or an empty string.

        The leading space of each line is removed.
        """
        return self.comments.get(path, "")


def find_buf() -> str | None:
    """Return the path of buf: next to this Python, or on the PATH. None if it is missing."""
    bin_folder = Path(sys.executable).parent
    return shutil.which("buf", path=f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}")


def read_contract(buf: str, protos: Path = REPOSITORY / "protos") -> list[CommentedFile]:
    """Return all files of the package below `protos`. Raises CalledProcessError if they do not
    compile."""
    # A buf image can be parsed as a FileDescriptorSet: it has additional fields.
    done = subprocess.run([buf, "build", str(protos), "-o", "-"], check=True, capture_output=True)
    files = FileDescriptorSet.FromString(done.stdout).file
    return [
        CommentedFile(descriptor=file, comments=_comments(file))
        for file in files
        if file.package == PACKAGE
    ]


def _comments(file: FileDescriptorProto) -> dict[PathInFile, str]:
    comments = {
        tuple(location.path): _without_margin(location.leading_comments)
        for location in file.source_code_info.location
        if location.leading_comments
    }
    for location in file.source_code_info.location:
        # A comment before `syntax`, separated by an empty line, describes the whole file.
        if tuple(location.path) == (SYNTAX,):
            about = [*location.leading_detached_comments, location.leading_comments]
            comments[(SYNTAX,)] = _without_margin("\n".join(text for text in about if text))
    return comments


def _without_margin(text: str) -> str:
    return "\n".join(line.removeprefix(" ").rstrip() for line in text.splitlines()).strip("\n")
