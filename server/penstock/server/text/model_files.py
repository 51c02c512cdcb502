"""Reads the files of a Hugging Face model folder that concern text.

These are tokenizer.json, config.json, generation_config.json, tokenizer_config.json,
special_tokens_map.json and the chat template. Defines which file takes precedence. The weights are
not read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import tokenizers

from penstock.server.text.errors import ModelFilesError

_MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFiles:
    """The content of the files of one model that concern text.

    Attributes:
        vocab_size: Number of logits of the model. Token ids that the model accepts are below it.
        eos_ids: All ids that end an output, ascending: the ids in generation_config.json (or in
            config.json if there are none), and the id of the tokenizer's end-of-sequence token.
        prepends_bos: True if the files of the tokenizer request a begin-of-sequence token that
            tokenizer.json does not add itself.
        special_tokens: Named special tokens for chat templates ("bos_token": "<s>").
    """

    path: Path
    name: str
    architecture: str
    tokenizer: tokenizers.Tokenizer
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    prepends_bos: bool
    chat_template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def bos_token(self) -> str:
        """Text of the begin-of-sequence token, empty if there is none."""
        return self.special_tokens.get("bos_token", "")

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token of the tokenizer, empty if there is none."""
        return self.special_tokens.get("eos_token", "")

    @classmethod
    def load(cls, path: Path, *, name: str | None = None) -> "ModelFiles":
        """Read the model folder `path`. `name` is the model name, by default the name of the
        folder. Raises ModelFilesError if a file is missing or invalid."""
        if not path.is_dir():
            raise ModelFilesError(f"{path}: not a folder")
        tokenizer = _read_tokenizer(path / "tokenizer.json")
        config = _Json.read(path / "config.json")
        generation = _Json.read(path / "generation_config.json", is_optional=True)
        settings = _Json.read(path / "tokenizer_config.json", is_optional=True)
        named = _Json.read(path / "special_tokens_map.json", is_optional=True)
        text_config = config.child("text_config")
        special_tokens = {**_special_tokens(named), **_special_tokens(settings)}

        vocab_size = text_config.integer("vocab_size") or config.integer("vocab_size")
        if not vocab_size or vocab_size < 1:
            raise ModelFilesError(f"{config.path}: vocab_size is missing or not positive")
        eos_ids = _eos_ids(generation, config, text_config)
        if (eos_token := special_tokens.get("eos_token")) is not None:
            eos_ids.add(_token_id(tokenizer, eos_token, settings.path, "eos_token"))
        bos_id: int | None = config.integer("bos_token_id")
        if (bos_token := special_tokens.get("bos_token")) is not None:
            bos_id = _token_id(tokenizer, bos_token, settings.path, "bos_token")
        for key, ids in (("eos_token_id", eos_ids), ("bos_token_id", {bos_id} - {None})):
            if any(token_id is not None and not 0 <= token_id < vocab_size for token_id in ids):
                raise ModelFilesError(f"{path}: {key} is outside the vocabulary of {vocab_size}")
        asks_for_bos = settings.values.get("add_bos_token") is True and bos_id is not None
        return cls(
            path=path,
            name=name or path.resolve().name,
            architecture=_architecture(config),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            bos_id=bos_id,
            eos_ids=tuple(sorted(eos_ids)),
            prepends_bos=asks_for_bos and tokenizer.num_special_tokens_to_add(False) == 0,
            chat_template=_chat_template(path, settings),
            special_tokens=special_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Json:
    """A JSON object and the file from which it was read, for errors that name both."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path, *, is_optional: bool = False) -> "_Json":
        """Read the file. Raises ModelFilesError if it is missing or is not a JSON object. A missing
        optional file is read as an empty object."""
        if is_optional and not path.exists():
            return cls(path=path, values={})
        try:
            value: object = json.loads(_read_text(path))
        except ValueError as error:
            raise ModelFilesError(f"{path}: not valid JSON: {error}") from error
        except RecursionError as error:
            raise ModelFilesError(f"{path}: nested too deep") from error
        if not isinstance(value, dict):
            raise ModelFilesError(f"{path}: must contain a JSON object")
        return cls(path=path, values=cast("dict[str, object]", value))

    def integer(self, key: str) -> int | None:
        """Return the value of `key`, or None if it is missing or null. Raises ModelFilesError if it
        is not an integer."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFilesError(f"{self.path}: {key} must be an integer")
        return value

    def child(self, key: str) -> "_Json":
        """Return the object under `key`, empty if it is missing or null. Raises ModelFilesError if
        it is anything else."""
        value = self.values.get(key)
        if value is None:
            return _Json(path=self.path, values={})
        if not isinstance(value, dict):
            raise ModelFilesError(f"{self.path}: {key} must be an object")
        return _Json(path=self.path, values=cast("dict[str, object]", value))


def _read_text(path: Path) -> str:
    """Return the text of a file.

    Raises ModelFilesError if the file cannot be read, is larger than `_MAX_FILE_BYTES` or is not
    UTF-8.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelFilesError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        hint = "; --tokenizer names a folder that has it" if path.name == "tokenizer.json" else ""
        raise ModelFilesError(f"{path}: the file is missing{hint}") from error
    except UnicodeDecodeError as error:
        raise ModelFilesError(f"{path}: not UTF-8") from error
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read: {error.strerror}") from error


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    # The library raises plain Exception for all errors in the file.
    except Exception as error:
        raise ModelFilesError(f"{path}: the tokenizers library rejects it: {error}") from error
    # Some folders have the truncation and padding of training, but a prompt must not be changed.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(source: _Json) -> dict[str, str]:
    """Return the special tokens of a file, keyed by the name of the entry, such as `bos_token`.

    An entry is a special token if its name ends in `_token` and its value is a string, or an object
    whose `content` is a string.
    """
    tokens: dict[str, str] = {}
    for key, value in source.values.items():
        if not key.endswith("_token"):
            continue
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def _token_id(tokenizer: tokenizers.Tokenizer, token: str, path: Path, key: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    if token_id is None:
        raise ModelFilesError(f"{path}: {key} {token!r} is not in tokenizer.json")
    return token_id


def _eos_ids(*sources: _Json) -> set[int]:
    """Return the end-of-sequence ids of the first source that has any; empty if there are none.

    Each source has one integer or a list of integers. Raises ModelFilesError for other values.
    """
    for source in sources:
        value = source.values.get("eos_token_id")
        if value is None:
            continue
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        found = {item for item in ids if isinstance(item, int) and not isinstance(item, bool)}
        if len(found) == 0 or len(found) != len(set(map(repr, ids))):
            raise ModelFilesError(f"{source.path}: eos_token_id must be one or more integers")
        return found
    return set()


def _architecture(config: _Json) -> str:
    names = config.values.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    model_type = config.values.get("model_type")
    return model_type if isinstance(model_type, str) else ""


def _chat_template(folder: Path, settings: _Json) -> str | None:
    """Return the source of the chat template; None without a template.

    The sources are, in this order, chat_template.jinja, tokenizer_config.json and
    chat_template.json. Raises ModelFilesError if a source is invalid.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    value = settings.values.get("chat_template")
    if value is None:
        legacy = _Json.read(folder / "chat_template.json", is_optional=True)
        value = legacy.values.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    return _default_template(value, settings.path)


def _default_template(value: object, path: Path) -> str:
    """Return the template named "default" in a list of objects with `name` and `template`. Raises
    ModelFilesError if `value` is not such a list or has no such template."""
    if not isinstance(value, list):
        raise ModelFilesError(f"{path}: chat_template must be a string or a list")
    templates: dict[object, object] = {}
    for entry in cast("list[object]", value):
        if not isinstance(entry, dict):
            raise ModelFilesError(f"{path}: chat_template must list objects")
        named = cast("dict[str, object]", entry)
        templates[named.get("name")] = named.get("template")
    template = templates.get("default")
    if not isinstance(template, str):
        raise ModelFilesError(f'{path}: chat_template has no template named "default"')
    return template
