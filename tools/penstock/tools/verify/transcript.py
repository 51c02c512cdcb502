"""Collects the events that a client receives for one request."""

from collections import defaultdict
from dataclasses import dataclass, field

from penstock.client import (
    Accepted,
    Event,
    Finished,
    OutputEnd,
    Progress,
    PromptEcho,
    RequestState,
    TokenRecord,
    Tokens,
)


@dataclass(slots=True)
class Transcript:
    """The content of a stream. `sequences`: the sequence number of each event. `token_times_s`: for
    each message with tokens, seconds after submission and number of tokens.
    """

    sequences: list[int] = field(default_factory=list[int])
    states: list[RequestState] = field(default_factory=list[RequestState])
    num_messages: int = 0
    num_tokens: int = 0
    token_times_s: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    accepted: Accepted | None = None
    finished: Finished | None = None
    prompt_records: list[TokenRecord] = field(default_factory=list[TokenRecord])
    _records: dict[int, list[TokenRecord]] = field(
        default_factory=lambda: defaultdict[int, list[TokenRecord]](list)
    )
    _texts: dict[int, list[str]] = field(default_factory=lambda: defaultdict[int, list[str]](list))

    def add(self, event: Event, at_s: float) -> None:
        """Add the next event, received `at_s` seconds after submission."""
        self.sequences.append(event.sequence)
        if isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, Progress):
            self.states.append(event.state)
        elif isinstance(event, PromptEcho):
            self.prompt_records += event.records
        elif isinstance(event, Tokens):
            self.num_messages += 1
            self.num_tokens += event.num_tokens
            if event.num_tokens:
                self.token_times_s.append((at_s, event.num_tokens))
            self._records[event.output_index] += event.records
            self._texts[event.output_index].append(event.text)
        else:
            self.finished = event

    def records(self, output_index: int = 0) -> list[TokenRecord]:
        """Return the token records of one output; empty if they were not requested."""
        return self._records[output_index]

    def ids(self, output_index: int = 0) -> list[int]:
        """Return the token ids of one output; empty if they were not requested."""
        return [record.id for record in self.records(output_index)]

    def text(self, output_index: int = 0) -> str:
        """Return the text of one output."""
        return "".join(self._texts[output_index])

    @property
    def end(self) -> OutputEnd:
        """How the first output ended; only for a request whose Finished event was received."""
        assert self.finished is not None
        return self.finished.outputs[0]
