"""Guided decoding in miniature: a guide becomes a few matching texts, one of which is generated.

All literal alternatives (of a regex, of a grammar's root rule, of a schema's enum) are kept; any
other guide gives one smallest text. This suffices to check that a guide arrives complete and is
obeyed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from tensorrt_llm.sampling_params import GuidedDecodingParams

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


def texts_of(guide: GuidedDecodingParams) -> list[str]:
    """Return texts that match the guide. Raises ValueError if it is invalid in its language.

    Also raises ValueError for guides without a text: too deep, too long or of an unknown kind.
    """
    try:
        return _texts_of(guide)
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        # Report only the error's type: the guide is client data.
        raise ValueError(f"invalid guided decoding: {type(error).__name__}") from None


def _texts_of(guide: GuidedDecodingParams) -> list[str]:
    if guide.json_object:
        return ["{}"]
    if guide.json is not None:
        return _texts_of_schema(guide.json)
    if guide.regex is not None:
        try:
            tree = sre_parser.parse(guide.regex)
        except re.error as error:
            raise ValueError(f"invalid regex: {error}") from error
        return list(islice(_expand(tree), MAX_TEXTS))
    if guide.grammar is not None:
        return _texts_of_grammar(guide.grammar)
    raise ValueError("structural_tag is not a guide of the stand-in")


def _texts_of_schema(schema: Any) -> list[str]:
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    tree: Any = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(tree, dict):
        raise ValueError("invalid json schema: it is no object")
    if tree.get("$ref") == "#":
        return []
    values: list[Any] = tree["enum"] if "enum" in tree else [_instance(tree)]
    return [json.dumps(value) for value in values]


def _instance(schema: dict[str, Any]) -> Any:
    """Return the smallest value of a schema that uses the common keywords."""
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


def _expand(nodes: Any) -> Iterator[str]:
    """Yield texts of a parsed regex: all alternatives, repeats as short as possible."""
    texts = [""]
    for op, value in nodes:
        parts = list(islice(_expand_node(op, value), MAX_TEXTS))
        texts = list(islice((text + part for text in texts for part in parts), MAX_TEXTS))
        _require_short(max(map(len, texts), default=0))
    yield from texts


def _require_short(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise ValueError(f"invalid regex: texts of it have more than {MAX_CHARS} characters")


def _expand_node(op: Any, value: Any) -> Iterator[str]:
    if op is sre.LITERAL:
        yield chr(value)
    elif op is sre.BRANCH:
        for branch in value[1]:
            yield from islice(_expand(branch), MAX_TEXTS)
    elif op is sre.SUBPATTERN:
        yield from islice(_expand(value[3]), MAX_TEXTS)
    elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, _high, body = value
        text = next(_expand(body), "")
        _require_short(len(text) * int(low))
        yield text * low
    elif op is sre.IN:
        yield from _of_class(value)
    elif op is sre.AT:
        yield ""
    else:
        yield "a"


def _of_class(items: Sequence[tuple[Any, Any]]) -> list[str]:
    """Return all characters of a literal class, otherwise one."""
    if all(op is sre.LITERAL for op, _ in items):
        return [chr(value) for _, value in items]
    op, value = items[0]
    if op is sre.RANGE:
        return [chr(value[0])]
    return [{sre.CATEGORY_DIGIT: "0", sre.CATEGORY_SPACE: " "}.get(value, "a")]


class TokenGuide:
    """The tokens that may come next after the generated ones."""

    def __init__(self, texts: Sequence[Sequence[int]], end_id: int) -> None:
        self._texts = [list(text) for text in texts]
        self._end_id = end_id

    def allowed(self, generated: list[int]) -> list[int]:
        """Return ids that continue one of the texts, or end it; none if the guide has no text."""
        if not self._texts:
            return []
        count = len(generated)
        going_on = [text for text in self._texts if text[:count] == generated]
        allowed = {text[count] for text in going_on if len(text) > count}
        if not allowed or any(len(text) == count for text in going_on):
            allowed.add(self._end_id)
        return sorted(allowed)
