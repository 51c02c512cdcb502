"""Converts prompts of all kinds to token ids, and ids to text; long conversions run on threads.

The order of the checks matters. A prompt that can be rejected by its number of bytes or ids is
rejected first. Then the prompt is charged to its tenant, and then it is tokenised. Each tenant has
a quota account for requests and tokens per minute in this front (gRPC server process). A prompt is
charged to it even if it is rejected later or if the call only tokenises or detokenises. It is
refunded if too much text of its tenant waits, or if other requests displace it from the engine's
queue. The engine has a separate account per tenant, shared by all fronts, and charges it for
admitted requests. A tenant must stay within both accounts. Both accounts use the algorithm of
`scheduler/quotas.py`.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.scheduler.quotas import NO_QUOTA, TenantQuota, charged, minute_breach
from penstock.server.front.errors import (
    RequestError,
    invalid_field,
    limit_exceeded,
    quota_exceeded,
    unsupported_feature,
)
from penstock.server.front.generation import (
    ChatInput,
    GenerationSpec,
    LongTokenInput,
    PromptInput,
    TextInput,
    TokenInput,
)
from penstock.server.front.limits import Limits
from penstock.server.front.submission import (
    TokenizedPrompt,
    check_prompt_fits,
    hash_prompt,
    prompt_too_long,
)
from penstock.server.text.errors import (
    BadTemplateArgument,
    ChatTemplateMissing,
    TextError,
    ToolsUnsupported,
    TooManyTokens,
    TooMuchText,
    WindowTooSmall,
)
from penstock.server.text.model_text import ModelText
from penstock.server.text.token_bound import num_utf8_bytes
from penstock.server.text.tokenizer import TextAccount
from penstock.server.text.tokenizer_pool import Steps, in_one_step, run_at_once

_MAX_TOKENS_HASHED_ON_LOOP = 4096
"""Up to this many tokens are hashed on the event loop, which takes about a third of a
millisecond."""
_MAX_TOKENS_DECODED_ON_LOOP = 1024
_BYTES_PER_TOKEN: Final = 4
"""Approximate bytes of text per token id, used to schedule and limit token ids like texts."""
_SALT_BYTES = 16
WINDOW_PATH = "chat_prompt.window_tokens"
_ARGUMENTS_PATH = "chat_prompt.template_arguments"
T = TypeVar("T")


_MAX_KEPT: Final = 1024


@dataclass(slots=True)
class _QuotaAccount:
    """The quota account of a tenant: for each limit, the time when it is fully replenished, on the
    front's clock."""

    requests_full_s: float
    tokens_full_s: float


def _no_quota(tenant: str) -> TenantQuota:
    del tenant
    return NO_QUOTA


class TextQuotas:
    """The quota accounts of one front, one per tenant, for prompts and tokens per minute.
    `quota_of` returns the current limits of a tenant."""

    def __init__(
        self,
        quota_of: Callable[[str], TenantQuota] = _no_quota,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quota_of = quota_of
        self._clock = clock
        self._accounts: dict[str, _QuotaAccount] = {}

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charge one prompt of at least `num_tokens` tokens to its tenant. Call `charge_more` when
        the exact number is known.

        Raises RequestError (QUOTA_EXCEEDED), without charging, if a limit is exceeded.
        """
        quota = self._quota_of(tenant)
        if quota.max_requests_per_minute is None and quota.max_tokens_per_minute is None:
            return
        now_s = self._clock()
        account = self._account(tenant, now_s)
        full_s = account.requests_full_s, account.tokens_full_s
        breach = minute_breach(quota, 1, max(num_tokens, 1), full_s, now_s)
        if breach is not None:
            raise quota_exceeded(tenant, breach)
        self._add(tenant, 1, num_tokens)

    def charge_more(self, tenant: str, num_tokens: int) -> None:
        """Charge `num_tokens` tokens in addition to the tokens charged by `charge`. The account may
        become overdrawn."""
        self._add(tenant, 0, num_tokens)

    def refund(self, tenant: str, num_tokens: int) -> None:
        """Refund one prompt and `num_tokens` tokens, because the prompt was not processed or its
        request was displaced."""
        self._add(tenant, -1, -num_tokens)

    def _add(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        quota, now_s = self._quota_of(tenant), self._clock()
        account = self._account(tenant, now_s)
        if (most := quota.max_requests_per_minute) is not None:
            account.requests_full_s = charged(account.requests_full_s, num_requests, most, now_s)
        if (most := quota.max_tokens_per_minute) is not None:
            account.tokens_full_s = charged(account.tokens_full_s, num_tokens, most, now_s)

    def _account(self, tenant: str, now_s: float) -> _QuotaAccount:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= _MAX_KEPT:
                self._accounts = {
                    name: kept
                    for name, kept in self._accounts.items()
                    if max(kept.requests_full_s, kept.tokens_full_s) > now_s
                }
            account = self._accounts[tenant] = _QuotaAccount(now_s, now_s)
        return account


def too_much_waiting_text(tenant: str, error: TooMuchText) -> RequestError:
    """Return the error for a tenant with too much text that waits to be tokenised."""
    return limit_exceeded(
        tenant,
        "max_text_bytes_per_tenant",
        error.max_bytes,
        "bytes of waiting text",
        error.retry_after_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedPrompt:
    """Token ids, int32 [n], and their `text`. For a prompt of token ids, `text` is empty unless
    requested.

    `num_dropped_messages` is the number of oldest chat messages that the chat window has removed.
    """

    ids: NDArray[np.int32]
    text: str = ""
    num_dropped_messages: int = 0


class Prompts:
    """Converts the prompts of one front to token ids, and token ids to text. `quotas` has the quota
    accounts of the tenants.

    In the methods, `is_replay` is True for a prompt that was admitted before. It is not charged
    again, and it is not rejected because too much text waits.
    """

    def __init__(self, text: ModelText, quotas: TextQuotas) -> None:
        self._text = text
        self.quotas = quotas

    async def encode(
        self,
        prompt: PromptInput,
        path: str,
        limits: Limits,
        *,
        tenant: str,
        max_tokens: int | None = None,
        has_text: bool = False,
        is_replay: bool = False,
    ) -> EncodedPrompt:
        """Convert the prompt to token ids. `path` is its field, for errors. If `has_text`, token
        ids are also converted to text.

        Raises RequestError if the prompt is invalid, can never fit the context, exceeds a limit of
        the tenant, or has tokens outside the model's vocabulary (a tokenizer may have more tokens
        than the model); for a text or a chat also if it has more than `max_tokens` tokens.
        """
        min_tokens = self._min_num_tokens(prompt)
        is_window = isinstance(prompt, ChatInput) and prompt.window_tokens is not None
        if min_tokens > limits.max_context_prompt_tokens and not is_window:
            raise prompt_too_long(path, min_tokens, limits, qualifier="at least ")
        if not is_replay:
            self.quotas.charge(tenant, min_tokens)

        def charge_more(num_tokens: int) -> None:
            if not is_replay:
                self.quotas.charge_more(tenant, max(0, num_tokens - min_tokens))

        try:
            if isinstance(prompt, TokenInput | LongTokenInput):
                return await self._read(prompt, tenant, has_text=has_text, is_bounded=not is_replay)
            encoded = await self._encoded(
                prompt, limits, max_tokens, TextAccount(tenant, not is_replay, charge_more)
            )
        except TooMuchText as error:
            self.quotas.refund(tenant, min_tokens)
            raise too_much_waiting_text(tenant, error) from None
        except TooManyTokens as error:
            raise prompt_too_long(path, error.num_tokens, limits, qualifier="at least ") from None
        except TextError as error:
            raise _text_error(error, path) from error
        _check_vocabulary(encoded.ids, path, limits)
        return encoded

    async def tokenize(
        self, generation: GenerationSpec, limits: Limits, *, is_replay: bool = False
    ) -> tuple[TokenizedPrompt, str]:
        """Return the prompt as ids with block hashes, and its text if echo is requested.

        A text or chat that does not fit the KV cache is returned without hashes and text;
        `check_prompt_fits` then rejects it. Raises the errors of `encode`, and for a prompt of
        token ids also the errors of `check_prompt_fits`.
        """
        if isinstance(generation.prompt, TokenInput | LongTokenInput):
            # Reject the prompt by its number of ids, before the ids are converted or decoded.
            check_prompt_fits(generation, generation.prompt.num_tokens, limits)
        encoded = await self.encode(
            generation.prompt,
            generation.prompt_path,
            limits,
            tenant=generation.tenant,
            max_tokens=limits.max_context_prompt_tokens,
            has_text=generation.output.echo,
            is_replay=is_replay,
        )
        ids = encoded.ids
        if len(ids) > limits.max_prompt_tokens:
            # Not hashed: the next check rejects the prompt with its exact number of tokens.
            return TokenizedPrompt(ids=ids), ""

        def hashed() -> TokenizedPrompt:
            prompt = hash_prompt(
                ids,
                generation,
                limits.block_size,
                is_prefix_caching=limits.config.is_prefix_caching,
                random_salt=lambda: secrets.token_bytes(_SALT_BYTES),
                shares_across_tenants=limits.config.shares_prefixes_across_tenants,
            )
            num_dropped = encoded.num_dropped_messages
            return replace(prompt, num_dropped_messages=num_dropped) if num_dropped else prompt

        if len(ids) <= _MAX_TOKENS_HASHED_ON_LOOP:
            prompt = hashed()
        else:
            prompt = await self.on_thread(hashed, num_tokens=len(ids), tenant=generation.tenant)
        return prompt, encoded.text if generation.output.echo else ""

    async def detokenize(
        self, ids: TokenInput | LongTokenInput, *, tenant: str, skip_special_tokens: bool
    ) -> str:
        """Return the text of token ids, for the Detokenize method. Raises RequestError if an id is
        outside the vocabulary, or if a limit of the tenant is exceeded."""
        self.quotas.charge(tenant, ids.num_tokens)
        try:
            read = await self._read(
                ids, tenant, has_text=True, skip_special_tokens=skip_special_tokens
            )
        except TooMuchText as error:
            self.quotas.refund(tenant, ids.num_tokens)
            raise too_much_waiting_text(tenant, error) from None
        return read.text

    async def on_thread(self, task: Callable[[], T], *, num_tokens: int, tenant: str) -> T:
        """Run `task` on the tokenizer's threads and return its result.

        The task waits in the queue of the tenant's texts, like a text of `num_tokens` tokens. It is
        not charged to the tenant's quota.
        """
        num_bytes = num_tokens * _BYTES_PER_TOKEN
        return await self._text.tokenizer.pool.run(
            in_one_step(task, num_bytes), tenant=tenant, num_bytes=num_bytes, is_bounded=False
        )

    async def _read(
        self,
        prompt: TokenInput | LongTokenInput,
        tenant: str,
        *,
        has_text: bool,
        skip_special_tokens: bool = True,
        is_bounded: bool = True,
    ) -> EncodedPrompt:
        """Return the ids of `prompt`, and their text if `has_text`.

        Raises TooMuchText if `is_bounded` and too much text of the tenant waits to be tokenised.
        """
        if isinstance(prompt, TokenInput) and not has_text:
            return EncodedPrompt(ids=prompt.read())
        num_bytes = prompt.num_tokens * _BYTES_PER_TOKEN

        def steps() -> Steps[EncodedPrompt]:
            yield num_bytes
            ids = prompt.read()
            if not has_text:
                return EncodedPrompt(ids=ids)
            yield num_bytes
            text = self._text.tokenizer.decode(
                ids.tolist(), skip_special_tokens=skip_special_tokens
            )
            return EncodedPrompt(ids=ids, text=text)

        is_long = has_text and prompt.num_tokens > _MAX_TOKENS_DECODED_ON_LOOP
        if not (is_long or isinstance(prompt, LongTokenInput)):
            return run_at_once(steps())
        return await self._text.tokenizer.pool.run(
            steps(), tenant=tenant, num_bytes=num_bytes, is_bounded=is_bounded
        )

    async def _encoded(
        self,
        prompt: TextInput | ChatInput,
        limits: Limits,
        max_tokens: int | None,
        account: TextAccount,
    ) -> EncodedPrompt:
        tokenizer = self._text.tokenizer
        if isinstance(prompt, TextInput):
            ids = await tokenizer.encode_async(
                prompt.text,
                add_special_tokens=prompt.add_special_tokens,
                max_tokens=max_tokens,
                account=account,
            )
            return EncodedPrompt(ids=ids, text=prompt.text)
        chat = await tokenizer.encode_chat_async(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            max_bytes=limits.config.max_prompt_bytes,
            window_tokens=prompt.window_tokens,
            max_tokens=max_tokens,
            data=prompt.data,
            account=account,
        )
        return EncodedPrompt(
            ids=chat.ids, text=chat.text, num_dropped_messages=chat.num_dropped_messages
        )

    def _min_num_tokens(self, prompt: PromptInput) -> int:
        """Return a lower bound of the number of prompt tokens; it is exact for token ids."""
        if isinstance(prompt, TokenInput | LongTokenInput):
            return prompt.num_tokens
        if isinstance(prompt, TextInput):
            num_bytes = num_utf8_bytes(prompt.text)
        else:
            num_bytes = sum(num_utf8_bytes(message.content) for message in prompt.messages)
        return self._text.tokenizer.min_num_tokens(num_bytes)


def _text_error(error: TextError, path: str) -> RequestError:
    """Return the error for an invalid text. `path` is the field of the text in the request."""
    match error:
        case ChatTemplateMissing():
            return unsupported_feature("chat_prompt", path, cause=str(error))
        case ToolsUnsupported():
            return unsupported_feature("tools", f"chat_prompt.{error.field}", cause=str(error))
        case BadTemplateArgument():
            return invalid_field(_ARGUMENTS_PATH, str(error))
        case WindowTooSmall():
            return invalid_field(WINDOW_PATH, str(error))
        case _:
            return invalid_field(path, str(error))


def _check_vocabulary(ids: NDArray[np.int32], path: str, limits: Limits) -> None:
    """Raise RequestError if a token of the prompt is outside the model's vocabulary."""
    highest = int(ids.max(initial=-1))
    if highest >= limits.vocab_size:
        raise invalid_field(
            path, f"becomes token {highest}, the model has tokens below {limits.vocab_size}"
        )
