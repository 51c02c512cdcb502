"""Prevents text from clients from becoming control tokens.

Determines which tokens are control tokens. If the text of a client contains the spelling of a
control token, an invisible mark is inserted into the spelling, and a copy of the tokenizer drops
the mark at a stage where the characters can no longer be merged into the token. Therefore the whole
prompt is encoded in one call: the control tokens of the template are encoded as control tokens, and
the same characters in a client's text as ordinary text.

The mark is a Unicode noncharacter. It is inserted only into texts with the spelling of a control
token. Such a text must not already contain the mark; other texts may.

This module also finds all texts that a client sends for a chat template: messages, tool calls,
tools and template arguments.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from penstock.server.text.chat_template import ChatMessage, JsonValue, TemplateData, ToolCall
from penstock.server.text.errors import ControlTokenError, TooManyTokens
from penstock.server.text.text_splitter import TextSplitter
from penstock.server.text.tokenizer_pool import Steps
from penstock.server.text.tokenizer_settings import TokenizerSettings, to_byte_level

MARK = "\ufdd0"
_ESCAPE_SPEED = 16
"""Searching is at least this many times as fast as encoding."""
_SEARCHED_CHARS = 64 << 10
_IDS_AT_ONCE = 16 << 10
_ASSISTANT: Final = "assistant"


class ControlTokens:
    """The control tokens of one tokenizer.

    They are its special tokens, and the added tokens that the chat template contains (some models
    do not flag the markers of their roles as special).
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, vocab_size: int, template: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._splitter = TextSplitter(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        written = {
            token_id: token.content
            for token_id, token in added.items()
            if not token.special and template and _is_markup(token.content, template)
        }
        self._special = _Spellings(special.values())
        self._all = _Spellings([*special.values(), *written.values()])
        # The last entry represents all ids of the tokenizer that the model does not have.
        self._is_control = np.zeros(max([vocab_size, *added]) + 2, dtype=np.bool_)
        # Text outside the vocabulary becomes the unknown token, which is harmless.
        unknown = cast("object", getattr(tokenizer.model, "unk_token", None))
        for token_id, content in (special | written).items():
            self._is_control[token_id] = content != unknown

    def first_step_bytes(self, num_chars: int) -> int:
        """Return the cost of the first step (see `Steps`) of encoding a text. This step searches
        the whole text and encodes its first slice.

        The cost is the number of bytes that can be encoded in the same time.
        """
        return num_chars // _ESCAPE_SPEED + self._splitter.slice_chars(num_chars)

    def escape(self, text: str, *, is_model_output: bool = False) -> str:
        """Escape control tokens: return `text` with a mark in each. Most texts are unchanged.

        If `is_model_output`, the text is an earlier assistant message. Then only special tokens are
        marked, because chat templates search these messages for other control tokens, such as
        `</think>`. Raises ControlTokenError if a token cannot be marked.
        """
        return (self._special if is_model_output else self._all).marked(text)

    def encode(
        self,
        text: str,
        *,
        is_escaped: bool,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        count: Callable[[int], None] = lambda _: None,
    ) -> Steps[NDArray[np.int32]]:
        """Encode an escaped text to int32 [n], one slice per step.

        `is_escaped` is True if `escape` has changed some part of the text. `count` is called with
        the number of added special tokens, and then with the number of tokens of each slice.
        Control tokens that are spelled without a mark come from the template and are allowed.
        Raises ControlTokenError if the result has more control tokens than the template spells:
        normalisation or an unusual vocabulary may create them from ordinary characters. Raises
        TooManyTokens as soon as there are more than `max_tokens` tokens.
        """
        tokenizer = self._splitting_tokenizer if is_escaped else self._tokenizer
        before, after = self._added_ids if add_special_tokens else ([], [])
        parts: list[NDArray[np.int32]] = [np.array(before, dtype=np.int32)]
        num_tokens = len(before) + len(after)
        count(num_tokens)
        for index, part in enumerate(self._splitter.slices(text)):
            if index:
                yield len(part)
            # `encode` would hold the GIL until it has finished.
            (encoding,) = tokenizer.encode_batch_fast([part], add_special_tokens=False)
            num_tokens += len(encoding)
            count(len(encoding))
            if max_tokens is not None and num_tokens > max_tokens:
                raise TooManyTokens(num_tokens)
            parts.append(_int32(encoding.ids))
        ids = np.concatenate([*parts, np.array(after, dtype=np.int32)])
        num_control = int(np.count_nonzero(self._is_control.take(ids, mode="clip")))
        num_control -= len(before) + len(after)
        if num_control > 0 and num_control > self._all.count(text):
            raise ControlTokenError("the text turns into a control token of the model")
        return ids

    @cached_property
    def _added_ids(self) -> tuple[list[int], list[int]]:
        """The ids of the tokens that the tokenizer adds before and after any text."""
        encoding = self._tokenizer.encode("a")
        ids, is_added = encoding.ids, encoding.special_tokens_mask
        start = is_added.index(0) if 0 in is_added else len(ids)
        num_own = len(ids) - sum(is_added)
        return ids[:start], ids[start + num_own :]

    @cached_property
    def _splitting_tokenizer(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer with an additional step. The step splits the text at the mark and
        drops the mark.

        The step is the last step of pre-tokenisation, after added tokens were matched and the text
        was split into words, so that only the marked spelling is encoded differently. The copy
        shares the model and takes almost no memory.
        """
        source = self._tokenizer
        twin = tokenizers.Tokenizer(source.model)
        added = [token for _, token in sorted(source.get_added_tokens_decoder().items())]
        # In batches, because the library rebuilds its automaton after each call.
        for is_special, run in itertools.groupby(added, key=lambda token: token.special):
            tokens: list[str | tokenizers.AddedToken] = list(run)
            if is_special:
                twin.add_special_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]
            else:
                twin.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]
        if _added_ids(twin) != _added_ids(source):
            twin = tokenizers.Tokenizer.from_str(source.to_str())
        if source.normalizer is not None:
            twin.normalizer = source.normalizer
        if source.post_processor is not None:
            twin.post_processor = source.post_processor
        is_byte_level = TokenizerSettings(source).is_byte_level
        mark = to_byte_level(MARK.encode()) if is_byte_level else MARK
        steps = [] if source.pre_tokenizer is None else [source.pre_tokenizer]
        twin.pre_tokenizer = pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.Split(mark, "removed")]
        )
        return twin


class _Spellings:
    """Finds the spellings of some tokens in a text, and marks them."""

    def __init__(self, contents: Iterable[str]) -> None:
        spellings = {content for content in contents if content}
        pattern = trie_pattern(spellings) or "(?!)"
        self._find = re.compile(pattern)
        self._longest = max(map(len, spellings), default=1)
        single = trie_pattern({spelling for spelling in spellings if len(spelling) == 1})
        self._unmarkable = re.compile(single or "(?!)")

    def marked(self, text: str) -> str:
        """Return `text` with a mark after the first character of each spelling.

        Raises ControlTokenError if a spelling in `text` is a single character, or if `text`
        contains both a spelling and the mark.
        """
        # Marked at all positions, so that overlapping spellings are marked too.
        starts = [found.start() for found in self._matches(text, overlapping=True)]
        if not starts:
            return text
        if any(self._unmarkable.match(text, start) for start in starts):
            raise ControlTokenError("the text contains a control token of a single character")
        if MARK in text:
            raise ControlTokenError("the text contains U+FDD0 next to a control token")
        borders = [0, *(start + 1 for start in starts), len(text)]
        return MARK.join(text[a:b] for a, b in itertools.pairwise(borders))

    def count(self, text: str) -> int:
        """Return the number of spellings, matched as in the tokenizers library: from left to right,
        the longest first."""
        return sum(1 for _ in self._matches(text))

    def _matches(self, text: str, *, overlapping: bool = False) -> Iterator[re.Match[str]]:
        """Yield matches from left to right, slice by slice, because a search holds the GIL."""
        position = 0
        while position < len(text):
            next_slice = position + _SEARCHED_CHARS
            found = self._find.search(text, position, next_slice + self._longest - 1)
            # A match that starts after the slice may be truncated; the next slice finds it.
            if found is None or found.start() >= next_slice:
                position = next_slice
                continue
            yield found
            position = found.start() + 1 if overlapping else found.end()


def trie_pattern(words: Iterable[str]) -> str:
    """Return a regular expression in the form of a trie that matches the longest of `words`; ""
    without words.

    A plain alternation would try thousands of reserved tokens one by one at each "<".
    """
    trie: dict[str, object] = {}
    for word in words:
        node = trie
        for char in word:
            node = cast("dict[str, object]", node.setdefault(char, {}))
        node[""] = None
    return _node_pattern(trie) if trie else ""


def _node_pattern(node: Mapping[str, object]) -> str:
    branches: list[str] = []
    for char, child in sorted(node.items()):
        if child is not None:
            branches.append(re.escape(char) + _node_pattern(cast("Mapping[str, object]", child)))
    if not branches:
        return ""
    is_word = "" in node
    if len(branches) == 1 and not is_word:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if is_word else ''}"


def _int32(ids: list[int]) -> NDArray[np.int32]:
    """Convert `ids` to an array in parts, because each conversion holds the GIL."""
    made = np.empty(len(ids), dtype=np.int32)
    for start in range(0, len(ids), _IDS_AT_ONCE):
        made[start : start + _IDS_AT_ONCE] = ids[start : start + _IDS_AT_ONCE]
    return made


def _added_ids(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    added = tokenizer.get_added_tokens_decoder()
    return {token_id: token.content for token_id, token in added.items()}


def _is_markup(content: str, template: str) -> bool:
    """Return True if the template contains `content`, and if `content` is a marker: at least two
    characters, of which one is neither a word character nor whitespace."""
    return len(content) > 1 and content in template and bool(re.search(r"[^\w\s]", content))


def escaped_chat(
    messages: Sequence[ChatMessage], data: TemplateData, controls: ControlTokens
) -> tuple[list[ChatMessage], TemplateData, bool]:
    """Return the messages and the template data with control tokens marked, and True if any were
    marked.

    Raises ControlTokenError if a control token cannot be marked.
    """
    escaped = [_escaped_message(message, controls) for message in messages]
    escaped_data = data
    if data.tools or data.arguments:
        escaped_data = replace(
            data,
            tools=tuple(_escaped_object(tool, controls.escape) for tool in data.tools),
            arguments=_escaped_object(data.arguments, controls.escape),
        )
    is_escaped = escaped != list(messages) or escaped_data != data
    if is_escaped and _has_mark(messages, data):
        raise ControlTokenError("the conversation contains U+FDD0 next to a control token")
    return escaped, escaped_data, is_escaped


def _escaped_message(message: ChatMessage, controls: ControlTokens) -> ChatMessage:
    escape = controls.escape
    return ChatMessage(
        role=escape(message.role),
        content=controls.escape(message.content, is_model_output=message.role == _ASSISTANT),
        name=escape(message.name) if message.name else "",
        tool_calls=tuple(
            ToolCall(
                id=escape(call.id),
                name=escape(call.name),
                arguments=_escaped_object(call.arguments, escape),
            )
            for call in message.tool_calls
        ),
        tool_call_id=escape(message.tool_call_id) if message.tool_call_id else "",
    )


def _escaped_object(
    value: Mapping[str, JsonValue], escape: Callable[[str], str]
) -> Mapping[str, JsonValue]:
    return {escape(key): _escaped_value(inner, escape) for key, inner in value.items()}


def _escaped_value(value: JsonValue, escape: Callable[[str], str]) -> JsonValue:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return _escaped_object(value, escape)
    if isinstance(value, Sequence):
        return [_escaped_value(inner, escape) for inner in value]
    return value


def _has_mark(messages: Sequence[ChatMessage], data: TemplateData) -> bool:
    """Return True if any text contains `MARK`."""
    found = False

    def check(text: str) -> str:
        nonlocal found
        found = found or MARK in text
        return text

    for message in messages:
        check(message.role + message.content + message.name + message.tool_call_id)
        for call in message.tool_calls:
            check(call.id + call.name)
            _escaped_object(call.arguments, check)
    for each in (*data.tools, data.arguments):
        _escaped_object(each, check)
    return found
