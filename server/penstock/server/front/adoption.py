"""Requests that come to this front and leave it while they run: the front's part of hand-overs.

Owns the way from an `Inheritance` to a request that lives here, and that a request which several
calls ask for at once comes only once. A reader that gives up does not stop it: what was taken from
elsewhere must not be lost on its way. Does not know gRPC: how a request is read from its bytes, and
how its events become bytes, is given.
"""

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.server.front.errors import ErrorReason, RequestError, refuse
from penstock.server.front.front import Front
from penstock.server.front.generation import Generation
from penstock.server.front.inheriting import (
    AlreadyTold,
    bequeath,
    ended_log,
    first_tokens,
    told_of,
)
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.message_log import MessageLog
from penstock.server.front.output_texts import output_texts
from penstock.server.front.prompt_tokens import tokenise
from penstock.server.front.resumable import Resumable
from penstock.server.front.submission import CallTimes, submission_for
from penstock.server.front.tenants import engine_request_id
from penstock.server.link.claims import ClaimPort
from penstock.server.link.ports import EngineUnavailable
from penstock.server.link.resume_frames import Inheritance

_MAX_STRANDED: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which request its client wants, from which message on, and what it has had of it.

    `num_received`: tokens of each output, empty where it does not say. `max_priority`: what its
    tenant may have now.
    """

    request_id: str
    tenant: str
    max_priority: int
    next_sequence: int
    num_received: tuple[int, ...] = ()


class Reviver(Protocol):
    """What the edge knows of requests as bytes."""

    def generation(
        self, message: bytes, request_id: str, tenant: str, max_priority: int
    ) -> Generation:
        """The request as it was sent. Raises RequestError where it cannot be served here."""
        ...

    def resumable(self, live: LiveRequest, log: MessageLog, told: AlreadyTold) -> Resumable:
        """What keeps a live request, its next message the next of `log`."""
        ...

    def ended(self, log: MessageLog, request_id: str, tenant: str, grace_s: float) -> Resumable:
        """What keeps a request that has ended."""
        ...


class Adoptions:
    """Brings requests to one front, and gives them away."""

    def __init__(self, front: Front, reviver: Reviver) -> None:
        self._front = front
        self._reviver = reviver
        self._stranded: dict[str, tuple[Inheritance, float]] = {}
        self._under_way: dict[str, asyncio.Task[Resumable | None]] = {}

    async def fetch(self, wanted: Wanted) -> Resumable | None:
        """The request, brought here from wherever it is; None where there is none.

        Raises RequestError: SEQUENCE_UNAVAILABLE, or when it cannot go on here now.
        """
        self._front.current_limits()
        name = engine_request_id(wanted.tenant, wanted.request_id)
        task = self._under_way.get(name)
        if task is None:
            task = asyncio.create_task(self._fetch(name, wanted), name="adoption")
            self._under_way[name] = task
            task.add_done_callback(lambda done: self._done(name, done))
        return await asyncio.shield(task)

    def give(self, name: str) -> Inheritance | None:
        """Give a request of this front away; see `Giver`."""
        resumptions = self._front.resumptions
        resumable = resumptions.named(name)
        if resumable is None:
            return self._take_stranded(name)
        inheritance = bequeath(resumable)
        if inheritance is not None:
            resumptions.give_away(resumable)
        return inheritance

    def _done(self, name: str, task: "asyncio.Task[Resumable | None]") -> None:
        self._under_way.pop(name, None)
        if not task.cancelled():
            task.exception()  # told to whoever still waits

    async def _fetch(self, name: str, wanted: Wanted) -> Resumable | None:
        inheritance = self._take_stranded(name) or await self._claim(name)
        if inheritance is None:
            return None
        told, grace_s = inheritance.log, inheritance.keepsake.grace_s
        if told is not None and told.is_ended:
            kept = self._reviver.ended(ended_log(told), wanted.request_id, wanted.tenant, grace_s)
            self._front.resumptions.add(kept)
            return kept
        try:
            return await self._revive(inheritance, wanted)
        except RequestError:
            # Asked for in another way it may go on: whoever asked wrongly must not end it.
            self._stranded[name] = inheritance, self._front.clock() + grace_s
            while len(self._stranded) > _MAX_STRANDED:
                del self._stranded[next(iter(self._stranded))]
            raise

    async def _claim(self, name: str) -> Inheritance | None:
        port = self._front.port
        if not isinstance(port, ClaimPort):
            return None
        try:
            return await port.claim(name)
        except EngineUnavailable:
            raise refuse(ErrorReason.ENGINE_DOWN) from None

    def _take_stranded(self, name: str) -> Inheritance | None:
        inheritance, expires_s = self._stranded.pop(name, (None, 0.0))
        return inheritance if expires_s > self._front.clock() else None

    async def _revive(self, inheritance: Inheritance, wanted: Wanted) -> Resumable:
        """Let it go on here."""
        front, keepsake = self._front, inheritance.keepsake
        generation = self._reviver.generation(
            keepsake.message, keepsake.request_id, wanted.tenant, wanted.max_priority
        )
        output = generation.output
        told = told_of(
            inheritance,
            wanted.next_sequence,
            wanted.num_received,
            num_outputs=generation.sampling.num_outputs,
            max_tokens=generation.stopping.max_tokens,
            tells_prompt=output.echo or output.num_prompt_logprobs >= 0,
        )
        limits = front.current_limits()
        request = LiveRequest(keepsake.request_id, generation, keepsake.arrival_s)
        front.table.add(request)
        try:
            await self._prepare(request, inheritance, told)
            front.table.add_outputs(request)
            log = MessageLog(wanted.next_sequence)
            if inheritance.log is not None:
                log = ended_log(inheritance.log)
            request.suspend(front.clock())
            resumable = self._reviver.resumable(request, log, told)
            front.resumptions.add(resumable)
            front.replays.adopt(request, limits)
        except BaseException:
            front.release(request)
            raise
        return resumable

    async def _prepare(
        self, request: LiveRequest, inheritance: Inheritance, told: AlreadyTold
    ) -> None:
        """Bring it to where it was: its prompt, its outputs, and what came of them."""
        front, generation = self._front, request.generation
        keepsake = inheritance.keepsake
        limits = front.current_limits()
        prompt, prompt_text = await tokenise(generation, front.text, limits)
        submission = submission_for(
            generation,
            prompt,
            limits=limits,
            times=CallTimes(arrival_s=keepsake.arrival_s, call_deadline_s=keepsake.deadline_s),
            request_id=request.request_id,
            keys=front.table.new_keys(generation.sampling.num_outputs),
            seed=keepsake.seed,
            eos_ids=front.text.files.eos_ids,
        )
        if not generation.output.echo:
            prompt_text = ""
        elif not prompt_text:
            prompt_text = front.text.tokenizer.decode(prompt.ids.tolist())
        texts = output_texts(generation, front.text)
        heard: dict[int, tuple[list[int], str]] = {}
        for index, ids in first_tokens(inheritance, told).items():
            deltas = [texts[index].push((token_id,)) for token_id in ids]
            if any(delta.stop is not None for delta in deltas):
                # It ended here by a stop string: it comes to its end once more, by itself.
                texts[index] = output_texts(generation, front.text)[index]
            elif ids:
                heard[index] = ids, "".join(delta.text for delta in deltas)
        request.start(
            submission,
            texts,
            model=front.model,
            prompt_text=prompt_text,
            now_s=front.clock(),
            has_content=front.accounts.has_content,
        )
        if any(told.tokens.values()):
            request.first_token_s = front.clock()
        for index, (ids, said) in heard.items():
            output = request.outputs[index]
            output.token_ids.extend(ids)
            if output.captured is not None:
                output.captured.add(said)
            told.tokens[index] -= len(ids)
