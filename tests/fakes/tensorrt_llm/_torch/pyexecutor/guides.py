"""A minimal form of guided decoding: a guide becomes a few matching texts, one of which is
generated.

All literal alternatives of a regex, of a grammar's root rule and of a schema's enum are kept, at
most 64 of a regex; any other guide gives one text. This suffices to test that a guide arrives
complete and is followed.
"""

import json
import re
from collections.abc import Sequence
from importlib import import_module
from itertools import islice, product
from typing import Any

# Python's regex parser has no types and no public name.
sre: Any = import_module("re._constants")
sre_parser: Any = import_module("re._parser")
MAX_TEXTS = 64
MAX_CHARS = 4096
"""Maximum length of a text, and of a repeated part of it."""
_ROOT_RULE = re.compile(r"root\s*::=\s*(?P<body>[^\n]+)")
_LITERAL = re.compile(r'"(?P<text>(?:[^"\\]|\\.)*)"')
_SMALLEST: dict[str, Any] = {
    "string": "", "integer": 0, "number": 0, "boolean": True, "null": None, "array": [],
}  # fmt: skip


def texts_of(guide: Any) -> list[str]:
    """Return texts that match the guide; an empty list for a recursive one.

    Raises ValueError if the guide is invalid in its language, nested too deeply, too long, or of an
    unknown kind.
    """
    try:
        if guide.json is not None:
            return _texts_of_schema(guide.json)
        if guide.regex is not None:
            return _expand(sre_parser.parse(guide.regex))
        if guide.grammar is not None:
            return _texts_of_grammar(guide.grammar)
    except re.error as error:
        raise ValueError(f"invalid regex: {error}") from error
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        # Report only the error's type: the guide is client data.
        raise ValueError(f"invalid guided decoding: {type(error).__name__}") from None
    raise ValueError("structural_tag is not a guide of the stand-in")


def _texts_of_schema(schema: str) -> list[str]:
    tree: Any = json.loads(schema)
    if not isinstance(tree, dict):
        raise ValueError("invalid json schema: it is no object")
    if tree.get("$ref") == "#":
        return []
    values: list[Any] = tree["enum"] if "enum" in tree else [_instance(tree)]
    return [json.dumps(value) for value in values]


def _instance(schema: dict[str, Any]) -> Any:
    """Return the smallest value of a schema that uses only common keywords."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type", "object") == "object":
        properties: dict[str, dict[str, Any]] = schema.get("properties", {})
        # What is required need not be described.
        return {name: _instance(properties.get(name, {})) for name in schema.get("required", [])}
    return _SMALLEST[schema["type"]]


def _texts_of_grammar(grammar: str) -> list[str]:
    rule = _ROOT_RULE.search(grammar)
    if rule is None:
        raise ValueError("the grammar has no root rule")
    if rule["body"].strip() == "root":
        return []
    literals = [json.loads(f'"{found["text"]}"') for found in _LITERAL.finditer(rule["body"])]
    if not literals:
        raise ValueError("the root rule has no literal")
    return literals if "|" in rule["body"] else ["".join(literals)]


def _expand(nodes: Any) -> list[str]:
    """Return texts that match a parsed regex: one for each alternative, at most MAX_TEXTS, with
    repeats as short as possible.
    """
    texts = [""]
    for op, value in nodes:
        parts = _expand_node(op, value)
        texts = [text + part for text, part in islice(product(texts, parts), MAX_TEXTS)]
        _require_short(max(map(len, texts)))
    return texts


def _expand_node(op: Any, value: Any) -> list[str]:
    if op is sre.LITERAL:
        return [chr(value)]
    if op is sre.BRANCH:
        return [text for branch in value[1] for text in _expand(branch)][:MAX_TEXTS]
    if op is sre.SUBPATTERN:
        return _expand(value[3])
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, _high, body = value
        text = _expand(body)[0]
        _require_short(len(text) * int(low))
        return [text * low]
    if op is sre.IN:
        # All characters of a literal class, otherwise one.
        literals = [chr(code) for kind, code in value if kind is sre.LITERAL]
        ranges = [chr(code[0]) for kind, code in value if kind is sre.RANGE]
        return literals or ranges[:1] or ["0"]
    return [""] if op is sre.AT else ["a"]


def _require_short(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise ValueError(f"invalid regex: texts of it have more than {MAX_CHARS} characters")


class TokenGuide:
    """Determines which tokens may follow the tokens generated so far."""

    def __init__(self, texts: Sequence[Sequence[int]], end_id: int) -> None:
        self._texts = [list(text) for text in texts]
        self._end_id = end_id

    def allowed(self, generated: list[int]) -> list[int]:
        """Return the ids that continue one of the texts, or end it; an empty list if the guide has
        no text.
        """
        if not self._texts:
            return []
        count = len(generated)
        continuing = [text for text in self._texts if text[:count] == generated]
        allowed = {text[count] for text in continuing if len(text) > count}
        if not allowed or any(len(text) == count for text in continuing):
            allowed.add(self._end_id)
        return sorted(allowed)
