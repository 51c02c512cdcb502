"""Finds unclear words in the docs and the code: words that a reader must translate into a standard
term of the field, such as `told` for "reported".

Prints a line per finding, `FILE:LINE: WORDS -> REPLACEMENTS`, and exits with 1 if there is one. To
mend a finding, write the sentence again, or rename the identifier, with a replacement that fits or
another standard term. Text between backticks is not checked: use them for a name of another project
that contains such a word. The words (regular expressions) and their replacements are in `_MARKERS`.

Checked are Markdown; comments, strings and identifiers of Python files (in tests, benchmarks,
client examples and docs/tools docstrings instead of all strings); comments of proto files,
Makefiles, pyproject.toml and mkdocs.yml; the whole text of other files.
"""

from __future__ import annotations

import argparse
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_CHECKED = (
    *("*.md", "docs/**/*.md", "*/README.md", "*/*/README.md", "*/penstock/**/README.md"),
    *("protos/**/*.proto", "clients/penstock/**/*.py", "gateways/**/*.py"),
    *("executors/penstock/**/*.py", "scheduler/penstock/**/*.py"),
    *("server/penstock/**/*.py", "tools/penstock/**/*.py"),
    *("benchmarks/**/*.py", "docs/tools/*.py", "tests/**/*.py", "clients/examples/*.py"),
    *(f"clients/*/**/*.{kind}" for kind in ("go", "ts", "java", "cpp", "h", "html")),
    *(
        "executors/penstock/**/*.[ch]",
        "protos/*.sh",
        "clients/examples/*.ipynb",
        "benchmarks/native/*.?pp",
    ),
    *("server/penstock/**/*.html", "server/penstock/**/*.js"),
    *(f"deploy/**/{name}" for name in ("*.json", "*.yaml", "*.toml", "*.sh", "Dockerfile")),
    *("Dockerfile", "Makefile", "clients/*/Makefile", "pyproject.toml", "mkdocs.yml"),
)
# A marker (a regular expression, case ignored; a space is a line break too) -> what to write.
_MARKERS = {
    r"tells?|telling|told|untold|foretells?|foretold": "report, return; delivered; predicted",
    r"says?|said|saying": "report, state, specify, return",
    r"hears?|heard": "receive, detect",
    r"(?:no|some|every|any)body|whoever|whomever": "no client, a caller, all tenants",
    r"(?<=[.;:,|(]\s)who(?! [^.|]*\?)": "a caller (client, tenant) that",
    r"anew": "again",
    r"wish(?:es)?": "option, request",
    r"dialogues?": "conversation",
    r"(?:go|goes|going|went|gone) on": "continue",
    r"turn(?:s|ed)? (?:\w+ ){0,2}away": "reject",
    r"hop(?:es?|ed|ing)": "expect, predict",
    r"strikes?": "fault",
    r"strangers?|newcomers?": "unauthenticated caller; new request",
    r"of (?:its|their) own": "own, separate, dedicated",
    r"beside": "next to, as well as, compared with",
    r"(?:last|first) words?": "final message, first message",
    r"without a word": "silently",
    r"means? nothing|meant nothing|of no meaning": "requires; has no effect; unknown",
    r"comes? round|by and by|thrown out": "repeat; gradually; preempted",
    r"the books|book-?keeping": "accounting, integrity",
    r"believes?|believed|knew": "trust, accept; has, records",
    r"bur(?:y|ies|ied)|bequeath\w*|keepsakes?": "detached request, transfer",
    r"orphan(?:ed)? (?:request|stream|output)s?": "detached request",
    r"(?<!connection\s)refus(?:es?|ed|als?|ing)": "reject, rejection",
    r"news|beats?": "updates; heartbeat",
    r"houses?|verdicts?": "harness, service; result",
    r"(?<=[.:]\s)(?:whether|what|how|where) (?:\w+ ){1,8}(?:says|shows|decides)": "subject first",
}
_SPACE = r"\s+(?:(?://+|\#+|>) )?"
_MARKER = re.compile("|".join(rf"(\b(?:{m})\b)" for m in _MARKERS).replace(" ", _SPACE), re.I)
_DOCSTRINGS_ONLY = ("tests/", "benchmarks/", "docs/tools/", "clients/examples/")
_NAME_PARTS = re.compile(r"_+|(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BUILT = {"build", "dist", "generated", "node_modules", "v1"}
_CODE = re.compile(
    r"^ *(`{3,})[^`]*$.*?^ *\1|<!--.*?-->|`[^`]+`|\]\([^)]*\)|https?://\S+", re.M | re.S
)


def prose(path: Path, text: str) -> str:
    """Return the prose of a file, with line numbers preserved. The prose of a Python file includes
    the words of each identifier, where it is first used."""
    if path.suffix == ".proto":
        text = "\n".join(map(_comment, text.splitlines()))
    if path.name in ("Makefile", "pyproject.toml", "mkdocs.yml"):
        text = "\n".join(line.partition("#")[2] for line in text.splitlines())
    if path.suffix == ".py":
        lines = [""] * (text.count("\n") + 2)
        names: set[str] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string not in names:
                names.add(token.string)
                lines[token.start[0] - 1] += f" | {_NAME_PARTS.sub(' ', token.string)} |"
            if token.type == tokenize.COMMENT or _is_prose(path, token):
                for number, line in enumerate(token.string.splitlines(), token.start[0] - 1):
                    lines[number] += f" {line}"
        text = "\n".join(lines)
    return _CODE.sub(lambda code: " _ " + "\n" * code[0].count("\n"), text)


def _is_prose(path: Path, token: tokenize.TokenInfo) -> bool:
    """Return whether the token is prose: a string; in tests, benchmarks, client examples and these
    tools only a docstring.
    """
    is_product = not path.as_posix().startswith(_DOCSTRINGS_ONLY)
    is_docstring = token.string.startswith('"""') and not token.line[: token.start[1]].strip()
    return token.type == tokenize.STRING and (is_product or is_docstring)


def _comment(line: str) -> str:
    """Return the comment in a line of a proto file; "" if there is none."""
    found = re.search(r"(?<!:)//+|^\s*/?\*+(?=\s|/)", line)
    return line[found.end() :] if found else ""


def markers(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number (from 1), the words and the replacement of each marker in the prose
    `text`.
    """
    for found in _MARKER.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield line, " ".join(found[0].split()), list(_MARKERS.values())[(found.lastindex or 1) - 1]


def _checked() -> list[Path]:
    found = {path.relative_to(_ROOT) for pattern in _CHECKED for path in _ROOT.glob(pattern)}
    written = (path for path in found if path.suffix == ".proto" or not _BUILT & {*path.parts})
    return sorted(written)


def main() -> int:
    """Print each marker, or with `--count` the number of words and markers of each file. Return the
    exit code: 1 if markers were printed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count",
        action="store_true",
        help="instead of findings, print the numbers of words, of findings and of findings per"
        " 1,000 words of each file; exit with 0",
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="relative to the repository's root (default: all files that must have no finding)",
    )
    arguments = parser.parse_args()
    num_words = num_markers = 0
    for path in arguments.files or _checked():
        text = prose(path, (_ROOT / path).read_text(encoding="utf-8"))
        words, found = len(re.findall(r"[A-Za-z]\w*", text)), list(markers(text))
        num_words, num_markers = num_words + words, num_markers + len(found)
        if arguments.count:
            print(f"{words:7} {len(found):5} {len(found) * 1000 / max(words, 1):6.1f}  {path}")
            continue
        for line, marker, instead in found:
            print(f"{path}:{line}: {marker} -> {instead}")
    if arguments.count:
        print(f"{num_words:7} {num_markers:5} {num_markers * 1000 / num_words:6.1f}  in all")
    return bool(num_markers) and not arguments.count


if __name__ == "__main__":
    raise SystemExit(main())
