"""A resumable request as it is given away, and as it goes on where it is received.

Owns both directions between a request of this front and an `Inheritance`. What was received goes on
after the last token that its client has: those that are known become a part of the prompt, and
those that are not are generated again and not told again. Sampling is a function of seed and
position, so they are the same. Does not know how an inheritance travels, nor gRPC.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from penstock.scheduler.request import NO_TIME, FinishReason
from penstock.server.front.errors import ErrorReason, Refusal, refuse
from penstock.server.front.events import Accepted, PromptPiece, StreamEvent, TokensPiece
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.message_log import MessageLog
from penstock.server.front.resumable import Resumable
from penstock.server.front.tenants import engine_request_id
from penstock.server.link.claims import ClaimPort
from penstock.server.link.ports import EnginePort
from penstock.server.link.resume_frames import Inheritance, Keep, Keepsake, ToldLog

_ALL: Final = 2**63


@dataclass(slots=True, eq=False)
class AlreadyTold:
    """What comes again and is not told again. `tokens`: how many of each output, by index.

    `closed`: outputs whose last text, what is held back until there can be no more, was told with
    their last token, if that was told.
    """

    is_accepted: bool = False
    is_echoed: bool = False
    num_prompt_records: int = 0
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    closed: set[int] = field(default_factory=set[int])

    def untold(self, batch: Iterable[StreamEvent], live: LiveRequest) -> list[StreamEvent]:
        """What of a request's `batch` is new."""
        return [left for event in batch if (left := self._untold(event, live)) is not None]

    def _untold(self, event: StreamEvent, live: LiveRequest) -> StreamEvent | None:
        match event:
            case Accepted() if self.is_accepted:
                return None
            case PromptPiece() if self.is_echoed:
                return self._untold_prompt(event)
            case TokensPiece() if (num_left := self.tokens.get(event.output_index, 0)) > 0:
                # Every piece has one token here: nothing was put together yet.
                self.tokens[event.output_index] = num_left - event.num_tokens
                return None
            case TokensPiece() if event.output_index in self.closed:
                if not event.num_tokens and _ended_by_itself(live, event.output_index):
                    return None
                self.closed.discard(event.output_index)
                return event
            case _:
                return event

    def _untold_prompt(self, piece: PromptPiece) -> PromptPiece | None:
        """The text was told at once, and of the records the first ones."""
        num_told = min(self.num_prompt_records, len(piece.records))
        self.num_prompt_records -= num_told
        rest = piece.records[num_told:]
        return PromptPiece(records=rest) if rest else None


def _ended_by_itself(live: LiveRequest, index: int) -> bool:
    """Whether an output ended with a token of its own, and not because it was cut off."""
    end = live.outputs[index].end
    return end is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH)


def keep_of(request: LiveRequest) -> Keep | None:
    """What the engine keeps of a request that was just submitted; None if it is not resumable."""
    keepsake = keepsake_of(request)
    if keepsake is None:
        return None
    return Keep(
        name=engine_request_id(request.tenant, request.request_id),
        keys=tuple((output.index, output.key) for output in request.outputs if output.is_live),
        keepsake=keepsake,
    )


def tell_engine(port: EnginePort, request: LiveRequest) -> None:
    """The engine has just been given the request: say so if it outlives this front."""
    if request.generation.resumption is not None and isinstance(port, ClaimPort):
        keep = keep_of(request)
        if keep is not None and keep.keys:
            port.keep(keep)


def keepsake_of(request: LiveRequest) -> Keepsake | None:
    """What makes the request again; None if it is not resumable or not yet with the engine."""
    resumption = request.generation.resumption
    if resumption is None or not request.specs:
        return None
    first = request.specs[0]
    return Keepsake(
        request_id=request.request_id,
        seed=first.sampling.seed,
        arrival_s=request.arrival_s,
        deadline_s=first.deadline_s,
        grace_s=resumption.grace_s,
        message=resumption.keepsake,
    )


def again_of(request: LiveRequest) -> Keepsake | None:
    """What makes a request that has ended once more; None where that might end in another way."""
    keepsake = keepsake_of(request)
    if keepsake is None or not all(_ended_by_itself(request, o.index) for o in request.outputs):
        return None
    first = request.specs[0]
    # Whichever comes first: a request that has kept its limits in time cannot keep them again.
    due_s = min(first.deadline_s, first.time_limit_s, first.ttft_deadline_s)
    return replace(keepsake, deadline_s=due_s)


def bequeath(resumable: Resumable) -> Inheritance | None:
    """All there is of a request, for another front; None where it cannot be given away yet.

    The caller takes it out of this front. Everything that came of it is in its log then.
    """
    live = resumable.live
    if live is not None:
        live.stream.release_held()
        resumable.fill_all()
    log = resumable.log
    told = ToldLog(
        first_sequence=log.first_sequence,
        messages=log.since(log.first_sequence),
        is_ended=log.is_ended,
        refusal="" if log.refusal is None else _to_json(log.refusal),
        num_prompt_records=resumable.num_prompt_records,
        ended_outputs=() if live is None else _ended_of(live),
        began_at=log.began_at,
    )
    if live is None or log.is_ended:
        again = resumable.again if live is None else again_of(live)
        keepsake = again or Keepsake(
            request_id=resumable.request_id,
            seed=0,
            arrival_s=0.0,
            deadline_s=NO_TIME,
            grace_s=resumable.grace_s,
            message=b"",
        )
        return Inheritance(keepsake=keepsake, log=told)
    kept = keepsake_of(live)
    if kept is None:
        return None
    tokens = tuple(
        (output.index, np.array(output.token_ids, dtype=np.int32)) for output in live.outputs
    )
    return Inheritance(keepsake=kept, tokens=tokens, log=told)


def _ended_of(live: LiveRequest) -> tuple[int, ...]:
    return tuple(output.index for output in live.outputs if output.end is not None)


def from_another_point(inheritance: Inheritance, next_sequence: int) -> Inheritance | None:
    """The same request without its log, which does not reach to where its client is.

    None where that is not so, or where nothing makes the request again. Of a spare copy, which may
    be older than what its client has, the tokens say nothing either.
    """
    log = inheritance.log
    if log is None or not inheritance.keepsake.message:
        return None
    if next_sequence < log.began_at:
        return replace(inheritance, log=None)
    if next_sequence > inheritance.next_sequence and inheritance.is_spare:
        return replace(inheritance, log=None, tokens=())
    return None


def ended_log(told: ToldLog) -> MessageLog:
    """The log of a request that has ended."""
    log = MessageLog(told.first_sequence, told.began_at)
    log.extend(told.messages)
    if told.is_ended:
        log.end(_from_json(told.refusal) if told.refusal else None)
    return log


def told_of(
    inheritance: Inheritance,
    next_sequence: int,
    num_received: Sequence[int],
    *,
    num_outputs: int,
    max_tokens: int | None,
    tells_prompt: bool,
) -> AlreadyTold:
    """What the client of a request has had of it.

    Without its log that is what the client says. Raises RequestError, SEQUENCE_UNAVAILABLE, where
    that does not fit together: messages without a count of tokens, counts without messages or of
    tokens that never were, and messages before the first token of which nobody knows how many were
    of the prompt.
    """
    log = inheritance.log
    if log is not None:
        counts = {index: len(ids) for index, ids in inheritance.tokens}
        is_accepted = log.first_sequence + len(log.messages) > 0
        return AlreadyTold(
            is_accepted, is_accepted, log.num_prompt_records, counts, set(log.ended_outputs)
        )
    if not next_sequence and not any(num_received):
        return AlreadyTold()
    known = {index: len(ids) for index, ids in inheritance.tokens}
    counts = dict(enumerate(num_received))
    fits = next_sequence > 0 and len(num_received) == num_outputs
    fits = fits and all(counts.get(index, 0) <= most for index, most in known.items())
    # Of those that have to come again nobody knows how many there were.
    fits = fits and (max_tokens is None or max(num_received) <= max_tokens)
    if tells_prompt and not any(num_received):
        fits = fits and next_sequence == 1
    if not fits:
        raise refuse(ErrorReason.SEQUENCE_UNAVAILABLE, first_sequence="0", next_sequence="0")
    begun = {index for index, count in counts.items() if count}
    return AlreadyTold(True, any(num_received), _ALL, counts, begun)


def first_tokens(inheritance: Inheritance, told: AlreadyTold) -> Mapping[int, list[int]]:
    """The tokens to go on after, by output: those that are known of those that were told."""
    return {index: ids[: told.tokens.get(index, 0)].tolist() for index, ids in inheritance.tokens}


def _to_json(refusal: Refusal) -> str:
    """What another front has to know to tell the same; fields of a request are no part of it."""
    return json.dumps(
        {
            "reason": refusal.reason.value,
            "message": refusal.message,
            "metadata": dict(refusal.metadata),
            "retry_after_s": refusal.retry_after_s,
        }
    )


def _from_json(text: str) -> Refusal:
    values = json.loads(text)
    return Refusal(
        reason=ErrorReason(values["reason"]),
        message=values["message"],
        metadata=values["metadata"],
        retry_after_s=values["retry_after_s"],
    )
