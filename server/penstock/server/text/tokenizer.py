"""Tokenises texts and chats of clients, on threads if they are long.

Combines the thread pool, the protection against forged control tokens, and the lower bound on the
number of tokens.

Text from a client (plain text, the content of a message or its role) never becomes a control token;
the characters are encoded as ordinary text. Control tokens that the chat template itself contains
are encoded as control tokens. A client that needs control tokens sends token ids.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.server.text.chat_template import NO_DATA, ChatMessage, ChatTemplate, TemplateData
from penstock.server.text.chat_window import TemplateCost, fit_window, measure_template
from penstock.server.text.control_tokens import MARK, ControlTokens, escaped_chat
from penstock.server.text.errors import ChatTemplateMissing, TooManyTokens
from penstock.server.text.model_files import ModelFiles
from penstock.server.text.text_splitter import SLICE_CHARS
from penstock.server.text.token_bound import TokenBound
from penstock.server.text.tokenizer_pool import Steps, TokenizerPool, in_larger_steps, run_at_once

_T = TypeVar("_T")

MAX_INLINE_CHARS = 256
"""Texts up to this length are encoded on the event loop. Switching to a thread and back takes 57 µs
(median, 2 cores), during which 200 to 300 characters of English are encoded (0.19 to 0.28 µs
each)."""

MAX_RENDERED_BYTES = 1 << 20
MAX_BYTES_PER_TENANT = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedChat:
    """An encoded chat: `ids`, int32 [n], and the `text` that the template rendered.

    `num_dropped_messages` is the number of the oldest messages that were dropped so that the others
    fit (`chat_window.py`).
    """

    ids: NDArray[np.int32]
    text: str
    num_dropped_messages: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class TextAccount:
    """Counts the tokens created from the text of one request, for its tenant.

    If `is_bounded`, the text is rejected if too much text of the tenant is queued or being encoded.
    `num_made` is the number of tokens created from the text. It includes tokens that a window
    drops, and tokens of a rejected or cancelled text. `on_end` is called with the final number.
    """

    tenant: str = ""
    is_bounded: bool = True
    on_end: Callable[[int], None] = lambda _: None
    num_made: int = 0

    def add(self, num_tokens: int) -> None:
        """Add to the number of created tokens."""
        self.num_made += num_tokens

    def end(self) -> None:
        """Report the final number of tokens."""
        self.on_end(self.num_made)


class Tokenizer:
    """The tokenizer of one model in one process.

    The `_async` methods and `close` must be called on the event loop; the others may be called on
    any thread.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        num_threads: int = 2,
        max_bytes_per_tenant: int = MAX_BYTES_PER_TENANT,
    ) -> None:
        """Load the tokenizer. At most `num_threads` texts are encoded concurrently on threads.

        See `TokenizerPool` for `max_bytes_per_tenant`. Raises ModelFilesError if the chat template
        is invalid.
        """
        self._library = files.tokenizer
        self._prepended = np.array([files.bos_id] if files.prepends_bos else [], dtype=np.int32)
        self._controls = ControlTokens(
            files.tokenizer, vocab_size=files.vocab_size, template=files.chat_template
        )
        self._template = (
            None
            if files.chat_template is None
            else ChatTemplate(files.chat_template, special_tokens=files.special_tokens)
        )
        self._template_costs: dict[bool, TemplateCost] = {}
        self._bound = TokenBound(files.tokenizer)
        self.pool = TokenizerPool(num_threads, max_bytes_per_tenant=max_bytes_per_tenant)

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return self._template is not None

    @property
    def has_tools(self) -> bool:
        """True if the chat template supports tools."""
        return self._template is not None and self._template.has_tools

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, decoded as one sequence. Unknown ids have no text."""
        # `decode` would hold the GIL until it has finished.
        (text,) = self._library.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def min_num_tokens(self, num_bytes: int) -> int:
        """Return the minimum number of tokens of a text of `num_bytes` bytes in UTF-8; 0 if
        unknown."""
        return self._bound.min_num_tokens(num_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Return the token ids of a client's text, int32 [n]. Raises ControlTokenError if a control
        token in the text cannot be encoded as ordinary text."""
        steps = self._encode(text, add_special_tokens=add_special_tokens, account=TextAccount())
        return run_at_once(steps)

    async def encode_async(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        account: TextAccount | None = None,
    ) -> NDArray[np.int32]:
        """Same as `encode`, but long texts are encoded on threads, alternating with the texts of
        other tenants.

        Raises TooManyTokens as soon as there are more than `max_tokens` tokens, and TooMuchText if
        too much text of the tenant is queued or being encoded; in that case `account.on_end` is not
        called.
        """
        account = account or TextAccount()
        steps = self._encode(
            text, add_special_tokens=add_special_tokens, max_tokens=max_tokens, account=account
        )
        return await self._run(steps, len(text), account)

    async def encode_chat_async(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        max_bytes: int = MAX_RENDERED_BYTES,
        window_tokens: int | None = None,
        max_tokens: int | None = None,
        data: TemplateData = NO_DATA,
        account: TextAccount | None = None,
    ) -> EncodedChat:
        """Render a chat with the chat template and encode it. The template adds the special tokens.

        Long chats are encoded on threads, as in `encode_async`. With `window_tokens` the oldest
        messages are dropped so that the others fit (chat_window.py), or WindowTooSmall is raised;
        `max_tokens` is then ignored. Raises ChatTemplateMissing, ChatTemplateError (also if the
        text is longer than `max_bytes`), ToolsUnsupported, BadTemplateArgument, ControlTokenError,
        TooManyTokens and TooMuchText.
        """
        template = self._template
        if template is None:
            raise ChatTemplateMissing("the model has no chat template; send text or token ids")
        template.check(messages, data)
        account = account or TextAccount()
        num_chars = sum(len(message.text) for message in messages) + data.num_bytes
        if window_tokens is None:
            steps = self._encode_chat(
                messages,
                template=template,
                add_generation_prompt=add_generation_prompt,
                max_bytes=max_bytes,
                max_tokens=max_tokens,
                data=data,
                account=account,
            )
        else:
            encode = functools.partial(
                self._encode_chat,
                template=template,
                add_generation_prompt=add_generation_prompt,
                max_bytes=max_bytes,
                max_tokens=window_tokens,
                data=data,
                account=account,
            )
            steps = in_larger_steps(
                self._encode_window(
                    messages,
                    window_tokens,
                    encode,
                    cost_key=add_generation_prompt if data == NO_DATA else None,
                    account=account,
                ),
                SLICE_CHARS // 2,
            )
        return await self._run(steps, num_chars, account)

    def close(self) -> None:
        """End the threads and drop waiting texts."""
        self.pool.close()

    def _encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        account: TextAccount,
        max_tokens: int | None = None,
    ) -> Steps[NDArray[np.int32]]:
        yield self._controls.first_step_bytes(len(text))
        escaped = self._controls.escape(text)
        ids = yield from self._controls.encode(
            escaped,
            is_escaped=escaped != text,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            count=account.add,
        )
        if add_special_tokens and len(self._prepended):
            account.add(len(self._prepended))
            return np.concatenate([self._prepended, ids])
        return ids

    def _encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        template: ChatTemplate,
        add_generation_prompt: bool,
        max_bytes: int,
        max_tokens: int | None,
        data: TemplateData,
        account: TextAccount,
    ) -> Steps[EncodedChat]:
        num_chars = sum(len(message.text) for message in messages) + data.num_bytes
        yield self._controls.first_step_bytes(num_chars)
        escaped, escaped_data, is_escaped = escaped_chat(messages, data, self._controls)
        text = template.render(
            escaped,
            add_generation_prompt=add_generation_prompt,
            max_bytes=max_bytes,
            data=escaped_data,
        )
        ids = yield from self._controls.encode(
            text,
            is_escaped=is_escaped,
            add_special_tokens=False,
            max_tokens=max_tokens,
            count=account.add,
        )
        return EncodedChat(ids=ids, text=text.replace(MARK, "") if is_escaped else text)

    def _encode_window(
        self,
        messages: Sequence[ChatMessage],
        window_tokens: int,
        encode: Callable[[Sequence[ChatMessage]], Steps[EncodedChat]],
        *,
        cost_key: bool | None,
        account: TextAccount,
    ) -> Steps[EncodedChat]:
        """Encode the part of a chat that fits the window.

        The cost of the template is cached under `cost_key`. If `cost_key` is None, the cost is
        measured for this call and not cached.
        """

        def num_tokens(text: str) -> Steps[int]:
            ids = yield from self._encode(text, add_special_tokens=False, account=account)
            return len(ids)

        def encode_up_to(turns: Sequence[ChatMessage]) -> Steps[EncodedChat]:
            try:
                return (yield from encode(turns))
            except TooManyTokens as error:
                # Only the length of a text that does not fit is needed.
                return EncodedChat(ids=np.broadcast_to(np.int32(0), error.num_tokens), text="")

        # Two threads may measure concurrently, with the same result.
        cost = None if cost_key is None else self._template_costs.get(cost_key)
        if cost is None:
            cost = measure_template(
                lambda turns: run_at_once(encode_up_to(turns)),
                lambda text: run_at_once(num_tokens(text)),
            )
        if cost_key is not None:
            self._template_costs[cost_key] = cost
        encoded, num_dropped = yield from fit_window(
            messages,
            window_tokens,
            encode=encode_up_to,
            num_tokens=num_tokens,
            cost=cost,
        )
        return replace(encoded, num_dropped_messages=num_dropped)

    async def _run(self, steps: Steps[_T], num_chars: int, account: TextAccount) -> _T:
        if num_chars > MAX_INLINE_CHARS:
            return await self.pool.run(
                steps,
                tenant=account.tenant,
                num_bytes=num_chars,
                is_bounded=account.is_bounded,
                on_end=account.end,
            )
        try:
            return run_at_once(steps)
        finally:
            account.end()
