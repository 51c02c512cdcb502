"""Fits a long chat into a window of tokens: drops the oldest messages so that the others fit.

Determines the position at which a chat is cut. The caller passes tokenizer and template as two
functions; both work in steps (`tokenizer_pool.py`). The leading system and developer messages are
never dropped.

**The cut moves in large steps.** If each new message dropped only the excess, each prompt would
start at another message and miss the prefix cache. Therefore, when the window overflows, the chat
is cut to about half of the window, and keeps that start until it overflows again. This needs no
state: the cuts are computed again from the first message, with the same result as before. The cut
depends only on the chat, so it is the same on all servers.

**Cost.** The cuts are computed from estimated lengths. Each message is encoded once; its estimated
length is its number of tokens plus the template's tokens per message, measured on two short chats.
The estimate is exact for templates that render all messages in the same way. The kept part is then
rendered and encoded. If it does not fit in the window, the cuts are computed again for a smaller
window. A chat of any length is thus encoded once message by message, and its kept part rarely more
than once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol, TypeVar

from penstock.server.text.chat_template import ChatMessage
from penstock.server.text.errors import ChatTemplateError, WindowTooSmall
from penstock.server.text.tokenizer_pool import Steps

_LEADING_ROLES: Final = frozenset({"system", "developer"})
_KEPT_SHARE: Final = 0.5
"""The share of the window, without the leading messages, that a cut keeps. About half of the window
is computed again after each cut, so each token is computed about twice over a chat of any
length."""
_WINDOW_SHARES: Final = (1.0, 7 / 8, 3 / 4, 1 / 2, 1 / 4)
_USUAL_MESSAGE_TOKENS: Final = 8
"""Number of tokens that a template adds per message, if it rejects the chat for the measurement."""


class _Encoded(Protocol):
    def __len__(self) -> int: ...


EncodedT = TypeVar("EncodedT", bound=_Encoded)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCost:
    """The number of tokens that a template adds: `base_tokens` to each chat, and `message_tokens`
    to the role and the content of each message."""

    base_tokens: int
    message_tokens: int


def measure_template(
    encode: Callable[[Sequence[ChatMessage]], _Encoded], num_tokens: Callable[[str], int]
) -> TemplateCost:
    """Measure, on two short chats, how many tokens a chat template adds.

    `encode` renders a chat with the template and encodes it; `num_tokens` counts the tokens of a
    plain text. For a template that rejects these chats, typical values are returned, because
    `fit_window` counts the tokens of the kept part anyway.
    """
    question = ChatMessage(role="user", content="a")
    answer = ChatMessage(role="assistant", content="a")
    own = {turn: num_tokens(turn.role) + num_tokens(turn.content) for turn in (question, answer)}
    try:
        short, longer = len(encode([question])), len(encode([question, answer, question]))
    except ChatTemplateError:
        return TemplateCost(base_tokens=0, message_tokens=_USUAL_MESSAGE_TOKENS)
    added = max(0, -(-(longer - short - own[question] - own[answer]) // 2))
    return TemplateCost(base_tokens=max(0, short - own[question] - added), message_tokens=added)


def fit_window(
    messages: Sequence[ChatMessage],
    window_tokens: int,
    *,
    encode: Callable[[Sequence[ChatMessage]], Steps[EncodedT]],
    num_tokens: Callable[[str], Steps[int]],
    cost: TemplateCost,
) -> Steps[tuple[EncodedT, int]]:
    """Return the kept part of a chat, encoded as at most `window_tokens` tokens, and the number of
    dropped messages.

    `encode` renders and encodes a chat; `num_tokens` counts the tokens of a plain text. Raises
    WindowTooSmall if the leading system and developer messages and the last turn together have more
    tokens, and the exceptions of the two functions. A turn starts at a message with the role of the
    first message after the leading ones.
    """
    num_leading = _num_leading(messages)
    turns = messages[num_leading:]
    costs: list[int] = []
    for message in messages:
        role_tokens = yield from num_tokens(message.role)
        content_tokens = yield from num_tokens(message.content)
        costs.append(cost.message_tokens + role_tokens + content_tokens)
    base_tokens = cost.base_tokens + sum(costs[:num_leading])
    sums = [0, *accumulate(costs[num_leading:])]
    may_start = [turn.role == turns[0].role for turn in turns]
    last_start = max((index for index, may in enumerate(may_start) if may), default=0)
    tried: set[int] = set()
    num_encoded = 0
    for share in _WINDOW_SHARES:
        max_tokens = int(window_tokens * share) - base_tokens
        start = (
            last_start if share == _WINDOW_SHARES[-1] else first_kept(sums, may_start, max_tokens)
        )
        if start in tried:
            continue
        tried.add(start)
        encoded = yield from encode([*messages[:num_leading], *turns[start:]])
        num_encoded = len(encoded)
        if num_encoded <= window_tokens:
            return encoded, start
    raise WindowTooSmall(
        "is too small for the leading messages and the last turn, which have at"
        f" least {num_encoded} tokens"
    )


def first_kept(sums: Sequence[int], may_start: Sequence[bool], max_tokens: int) -> int:
    """Return the index of the first kept message of a chat that grew message by message.

    `sums` [n + 1] has at index i the number of tokens of the first i messages. `may_start` [n] is
    True for the messages with which the kept part may start. When the kept part has more than
    `max_tokens` tokens, it is cut to at most `_KEPT_SHARE` of `max_tokens`, or to the latest
    possible start. Linear in n: no start is checked twice, because a start that is too early at
    some length is too early at any greater length.
    """
    starts = [index for index, may in enumerate(may_start) if may and index]
    start = num_passed = 0
    for end in range(1, len(sums)):
        if sums[end] - sums[start] <= max_tokens:
            continue
        while num_passed < len(starts) and starts[num_passed] < end:
            start = starts[num_passed]
            num_passed += 1
            if sums[end] - sums[start] <= max_tokens * _KEPT_SHARE:
                break
    return start


def _num_leading(messages: Sequence[ChatMessage]) -> int:
    """Return the number of leading system and developer messages, at most all messages but one."""
    for index, message in enumerate(messages):
        if message.role not in _LEADING_ROLES:
            return index
    return len(messages) - 1
