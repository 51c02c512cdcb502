"""Checks of plain generation: repeatability, usage counts, streaming, text, and the stop
conditions.
"""

from penstock.client import FinishReason
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckSkipped,
    require,
)
from penstock.tools.verify.subject import Subject

_NUM_TOKENS = 24
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


async def _greedy(subject: Subject) -> str:
    first, second = [(await subject.greedy(_NUM_TOKENS)).ids() for _ in range(2)]
    require(bool(first), "no tokens")
    parts = next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), None
    )
    require(first == second, f"two runs differ from token {parts}")
    return f"{len(first)} tokens, the same in two runs"


async def _accounts(subject: Subject) -> str:
    transcript = await subject.greedy(_NUM_TOKENS)
    accepted, finished = transcript.accepted, transcript.finished
    require(accepted is not None and finished is not None, "no Accepted or no Finished")
    assert accepted is not None
    assert finished is not None
    sequences = transcript.sequences
    require(
        sequences == sorted(set(sequences)) and sequences[0] == 0,
        f"sequence numbers are out of order: {sequences[:8]}",
    )
    usage, timings = finished.usage, finished.timings
    require(bool(accepted.request_id), "no request id")
    require(
        usage.num_prompt_tokens == accepted.num_prompt_tokens > 0,
        f"{accepted.num_prompt_tokens} prompt tokens accepted, {usage.num_prompt_tokens} in usage",
    )
    counted = sum(end.num_completion_tokens for end in finished.outputs)
    require(
        usage.num_completion_tokens == counted == transcript.num_tokens == len(transcript.ids()),
        f"usage {usage.num_completion_tokens}, outputs {counted}, messages"
        f" {transcript.num_tokens}, ids {len(transcript.ids())}",
    )
    require(timings.ttft_s is not None, "timings have no time to the first token")
    require(0 < (timings.ttft_s or 0) <= timings.total_s, "the first token came after the end")
    return f"{usage.num_prompt_tokens} prompt and {counted} output tokens add up"


async def _streaming(subject: Subject) -> str:
    transcript = await subject.greedy(_NUM_TOKENS * 2)
    times_s = [at_s for at_s, _ in transcript.token_times_s]
    require(len(times_s) > 1, f"{transcript.num_tokens} tokens came in one message")
    require(times_s[0] < times_s[-1], "all messages came at the same time")
    return (
        f"{transcript.num_tokens} tokens in {len(times_s)} messages, first after"
        f" {times_s[0] * 1e3:.0f} ms, last after {times_s[-1] * 1e3:.0f} ms"
    )


async def _text_of_tokens(subject: Subject) -> str:
    transcript = await subject.greedy(_NUM_TOKENS * 2)
    whole = await subject.client.detokenize(transcript.ids())
    # The last token may end within a character.
    streamed, whole = transcript.text().strip(_REPLACEMENT + " "), whole.strip(_REPLACEMENT + " ")
    require(streamed == whole, f"streamed {streamed!r}, the tokens are {whole!r}")
    return f"{len(streamed)} characters, equal to the tokens"


async def _max_tokens(subject: Subject) -> str:
    for num_tokens in (1, 7):
        transcript = await subject.greedy(num_tokens)
        end = transcript.end
        require(
            end.num_completion_tokens == num_tokens == len(transcript.ids()),
            f"{end.num_completion_tokens} tokens instead of {num_tokens}",
        )
        require(end.finish_reason is FinishReason.LENGTH, f"ended by {end.finish_reason.name}")
    return "1 and 7 tokens, exactly"


async def _stop_token(subject: Subject) -> str:
    ids = (await subject.greedy(_NUM_TOKENS)).ids()
    at = _last_new_index(ids)
    end = (await subject.greedy(_NUM_TOKENS, stop_token_ids=[ids[at]])).end
    require(end.finish_reason is FinishReason.STOP, f"ended by {end.finish_reason.name}")
    require(end.stop_token_id == ids[at], f"stopped by {end.stop_token_id} instead of {ids[at]}")
    require(
        end.num_completion_tokens == at + 1,
        f"{end.num_completion_tokens} tokens, the stop token is number {at + 1}",
    )
    return f"stopped at token {at + 1}"


def _last_new_index(ids: list[int]) -> int:
    """Return the index of the last token, other than the final one, that does not occur earlier."""
    return max(at for at in range(max(1, len(ids) - 1)) if ids[at] not in ids[:at])


async def _stop_string(subject: Subject) -> str:
    text = (await subject.greedy(_NUM_TOKENS * 2)).text()
    stop = _stop_string_in(text)
    transcript = await subject.greedy(_NUM_TOKENS * 2, stop=stop)
    kept = text[: text.index(stop)]
    require(transcript.text() == kept, f"{transcript.text()!r} instead of {kept!r}")
    end = transcript.end
    require(end.finish_reason is FinishReason.STOP, f"ended by {end.finish_reason.name}")
    require(end.stop_string == stop, f"stopped by {end.stop_string!r} instead of {stop!r}")
    return f"{len(kept)} characters before it, none of it delivered"


def _stop_string_in(text: str) -> str:
    """Return three consecutive printable characters from the second half of `text`, to be used as
    stop string. They must not be the start of the text. Raises CheckSkipped if there are none.
    """
    for start in range(len(text) // 2, len(text) - 3):
        piece = text[start : start + 3]
        if _REPLACEMENT not in piece and piece.isprintable() and text.index(piece) > 0:
            return piece
    raise CheckSkipped("the model's text has no usable stop string")


async def _min_tokens(subject: Subject) -> str:
    first = (await subject.greedy(2)).ids()[0]
    wanted = subject.clamp_output_tokens(8)
    transcript = await subject.greedy(wanted + 4, stop_token_ids=[first], min_tokens=wanted)
    num_tokens = transcript.end.num_completion_tokens
    require(num_tokens >= wanted, f"{num_tokens} tokens, at least {wanted} were requested")
    require(first not in transcript.ids()[:wanted], "a stop token was drawn too early")
    return f"{num_tokens} tokens, although the first one was a stop token"


CHECKS = (
    Check(name="greedy", run=_greedy),
    Check(name="accounts", run=_accounts),
    Check(name="streaming", run=_streaming),
    Check(name="text-of-tokens", run=_text_of_tokens, feature="text_prompt"),
    Check(name="max-tokens", run=_max_tokens),
    Check(name="stop-token", run=_stop_token),
    Check(name="stop-string", run=_stop_string, feature="text_prompt"),
    Check(name="min-tokens", run=_min_tokens, feature="min_tokens"),
)
