"""The part of a resumed stream that its client has received.

Owns the checks of a client's position, and the filter of a request's events. Does not know how they
are sent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.scheduler.request import FinishReason
from penstock.server.front.errors import ErrorReason, RequestError, refuse
from penstock.server.front.events import Accepted, PromptPiece, StreamEvent, TokensPiece
from penstock.server.front.generation import Generation
from penstock.server.front.live_request import LiveRequest


@dataclass(slots=True, eq=False)
class Received:
    """`tokens`: how many of each output, by index.

    `closed`: outputs whose last text, which is held back until the output ends, was delivered with
    their last token, if that was delivered.
    """

    is_accepted: bool = False
    is_echoed: bool = False
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    closed: set[int] = field(default_factory=set[int])

    def rest_of(self, batch: Iterable[StreamEvent], live: LiveRequest) -> list[StreamEvent]:
        """The new part of a request's `batch`. Every piece of it has one token at most."""
        return [event for event in batch if self._is_new(event, live)]

    def _is_new(self, event: StreamEvent, live: LiveRequest) -> bool:
        match event:
            case Accepted():
                return not self.is_accepted
            case PromptPiece():
                return not self.is_echoed
            case TokensPiece() if (num_left := self.tokens.get(event.output_index, 0)) > 0:
                self.tokens[event.output_index] = num_left - event.num_tokens
                return False
            case TokensPiece() if event.output_index in self.closed:
                if not event.num_tokens and _ended_by_itself(live, event.output_index):
                    return False
                self.closed.discard(event.output_index)
                return True
            case _:
                return True


def received(generation: Generation, next_sequence: int, num_tokens: Sequence[int]) -> Received:
    """The position of a client that got `num_tokens` of each output, and wants `next_sequence`
    next.

    Raises RequestError, SEQUENCE_UNAVAILABLE, for an inconsistent position: more outputs or tokens
    than there can be, or a position inside the prompt.
    """
    most = generation.stopping.max_tokens
    fits = len(num_tokens) <= generation.sampling.num_outputs
    fits = fits and (most is None or max(num_tokens, default=0) <= most)
    output = generation.output
    if (output.echo or output.num_prompt_logprobs >= 0) and not any(num_tokens):
        fits = fits and next_sequence <= 1
    if not fits:
        raise refuse_sequence()
    counts = dict(enumerate(num_tokens))
    begun = {index for index, count in counts.items() if count}
    return Received(next_sequence > 0, next_sequence > 0 and bool(begun), counts, begun)


def refuse_sequence() -> RequestError:
    """The error to raise for a position from which a stream cannot continue; it may from
    the start.
    """
    return refuse(ErrorReason.SEQUENCE_UNAVAILABLE, first_sequence="0", next_sequence="0")


def _ended_by_itself(live: LiveRequest, index: int) -> bool:
    """Whether an output ended with its own last token, and was not truncated."""
    end = live.outputs[index].end
    return end is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH)
