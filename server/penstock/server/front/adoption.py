"""Requests that come to this front and leave it while they run: the front's part of hand-overs.

Owns the way from an `Inheritance` to a request that lives here, and that a request which several
calls ask for at once comes only once. A reader that gives up does not stop it: what was taken from
elsewhere must not be lost on its way. What is given away stays as a spare copy until another has
it for certain. Does not know gRPC: how a request is read from its bytes, and
how its events become bytes, is given.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from penstock.scheduler.executor import Feature
from penstock.server.front.errors import ErrorReason, RequestError, refuse
from penstock.server.front.front import Front
from penstock.server.front.generation import Generation
from penstock.server.front.inheriting import (
    AlreadyTold,
    bequeath,
    ended_log,
    first_tokens,
    from_another_point,
    told_of,
)
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.message_log import MessageLog
from penstock.server.front.output_texts import output_texts
from penstock.server.front.resumable import Resumable
from penstock.server.front.submission import CallTimes, submission_for
from penstock.server.front.tenants import PriorityCeilings, engine_request_id
from penstock.server.link.claims import Claimed, ClaimPort
from penstock.server.link.ports import EngineUnavailable
from penstock.server.link.resume_frames import Inheritance, Keepsake, Lack

_Answer: TypeAlias = Callable[[Inheritance | Lack], None]
_LOOK_AGAIN_S: Final = 0.5
"""Whoever waits for an engine looks so often whether one may still come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which request its client wants, from which message on, and what it has had of it.

    `num_received`: tokens of each output, empty where it does not say. `ceilings`: its tenant's
    now.
    """

    request_id: str
    tenant: str
    ceilings: PriorityCeilings
    next_sequence: int
    num_received: tuple[int, ...] = ()


class Reviver(Protocol):
    """What the edge knows of requests as bytes."""

    def generation(
        self, message: bytes, request_id: str, tenant: str, ceilings: PriorityCeilings
    ) -> Generation:
        """The request as it was sent. Raises RequestError where it cannot be served here."""
        ...

    def resumable(self, live: LiveRequest, log: MessageLog, told: AlreadyTold) -> Resumable:
        """What keeps a live request, its next message the next of `log`."""
        ...

    def ended(self, log: MessageLog, kept: Keepsake, tenant: str) -> Resumable:
        """What keeps a request that has ended. `kept` without a message: it cannot come again."""
        ...


class Adoptions:
    """Brings requests to one front, and gives them away: the `Keeper` of its port."""

    def __init__(self, front: Front, reviver: Reviver) -> None:
        self._front = front
        self._reviver = reviver
        self._under_way: dict[str, asyncio.Task[Resumable | None]] = {}
        # In hand: not elsewhere any more and not here yet. Who asks for one is answered then.
        self._in_hand: dict[str, list[_Answer]] = {}
        self._spares = front.resumptions.spares

    async def fetch(self, wanted: Wanted) -> Resumable | None:
        """The request, brought here from wherever it is; None where there is none.

        While there is no engine to ask, waits for one as long as requests wait for one.

        Raises RequestError: SEQUENCE_UNAVAILABLE, or when it cannot be had or said now.
        """
        name = engine_request_id(wanted.tenant, wanted.request_id)
        due_s = self._front.clock() + self._front.config.max_replay_wait_s
        while True:
            await self._engine_there(due_s)
            task = self._under_way.get(name)
            if task is None:
                task = self._begin(name, self._fetch(name, wanted))
            try:
                return await asyncio.shield(task)
            except EngineUnavailable:
                continue  # it went while it was asked

    async def begin_again(self, kept: Resumable, wanted: Wanted) -> Resumable | None:
        """A request of this front, from a point that its log does not reach back to.

        It is generated once more as far as it must be. None where it cannot be: nothing happened.
        Raises RequestError when the client's counts do not fit.
        """
        name = engine_request_id(wanted.tenant, wanted.request_id)
        whole = bequeath(kept) if self._can_repeat(kept) else None
        inheritance = None if whole is None else from_another_point(whole, wanted.next_sequence)
        if inheritance is None:
            return None
        self._told(inheritance, wanted)  # raises before anything is let go of
        self._in_hand[name] = []
        self._front.resumptions.give_away(kept)
        return await asyncio.shield(self._begin(name, self._go_on(name, inheritance, wanted)))

    def give(self, name: str, answer: _Answer) -> None:
        """See `Keeper`."""
        if name in self._in_hand:
            self._in_hand[name].append(answer)
            return
        resumptions = self._front.resumptions
        resumable = resumptions.named(name)
        if resumable is None:
            answer(self._spares.get(name) or Lack.NOT_THERE)
            return
        inheritance = bequeath(resumable)
        if inheritance is None:
            answer(Lack.UNSURE)  # it is being prepared
            return
        self._spares.put(name, inheritance)
        resumptions.give_away(resumable)
        answer(inheritance)

    def let_go(self, name: str) -> None:
        """See `Keeper`."""
        self._spares.drop(name)
        resumable = self._front.resumptions.named(name)
        # A new request of the same id is refused by the engine, and no business of ours.
        if resumable is not None and resumable.live is not None and resumable.live.num_replays:
            self._front.resumptions.give_away(resumable)

    async def _engine_there(self, due_s: float) -> None:
        """Return once there is an engine. Raises RequestError where none comes in time."""
        front = self._front
        while not front.is_engine_up and not front.is_draining:
            left_s = due_s - front.clock()
            port = front.port
            if not isinstance(port, ClaimPort) or not front.replays.are_on or left_s <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _LOOK_AGAIN_S)):
                    await port.wait_up()
            await asyncio.sleep(0)
        front.current_limits()

    def _begin(
        self, name: str, coming: Coroutine[Any, Any, Resumable | None]
    ) -> "asyncio.Task[Resumable | None]":
        task = asyncio.create_task(coming, name="adoption")
        self._under_way[name] = task
        task.add_done_callback(lambda done: self._done(name, done))
        return task

    def _done(self, name: str, task: "asyncio.Task[Resumable | None]") -> None:
        if self._under_way.get(name) is task:
            del self._under_way[name]
        if not task.cancelled():
            task.exception()  # told to whoever still waits

    async def _fetch(self, name: str, wanted: Wanted) -> Resumable | None:
        """Raises EngineUnavailable, RequestError."""
        found = await self._claim(name)
        mine = self._spares.get(name)
        if isinstance(found, Claimed):
            inheritance = found.inheritance
            is_older = mine is not None and mine.next_sequence > inheritance.next_sequence
            if mine is not None and inheritance.is_spare and is_older:
                inheritance = mine
            return await self._go_on(name, inheritance, wanted, found.settle)
        if found is Lack.TOO_MANY:
            raise refuse(ErrorReason.QUEUE_FULL, "too many ask for requests of other fronts")
        if found is Lack.UNSURE:
            raise refuse(ErrorReason.ENGINE_DOWN, "who has the request cannot be said now")
        return None if mine is None else await self._go_on(name, mine, wanted)

    async def _go_on(
        self,
        name: str,
        inheritance: Inheritance,
        wanted: Wanted,
        settle: Callable[[bool], None] = lambda _: None,
    ) -> Resumable:
        """Let it go on here, or keep it for whoever asks in another way."""
        self._in_hand.setdefault(name, [])
        is_taken = False
        try:
            resumable = await self._revive(inheritance, wanted)
            is_taken = True
        finally:
            if is_taken:
                self._spares.drop(name)
            else:
                self._spares.put(name, inheritance)
            settle(is_taken)
            for answer in self._in_hand.pop(name):
                self.give(name, answer)
        return resumable

    async def _claim(self, name: str) -> Claimed | Lack:
        port = self._front.port
        return await port.claim(name) if isinstance(port, ClaimPort) else Lack.NOT_THERE

    def _can_repeat(self, kept: Resumable) -> bool:
        """Whether what was told would come again."""
        hello, again = self._front.hello, kept.again
        if hello is None or Feature.SEED not in hello.executor.features:
            return False
        if kept.live is not None:
            return True
        return again is not None and again.deadline_s > self._front.clock()

    def _told(
        self, inheritance: Inheritance, wanted: Wanted
    ) -> tuple[Inheritance, Generation, AlreadyTold]:
        """What goes on of it, and what its client has had. Raises RequestError."""
        keepsake = inheritance.keepsake
        generation = self._reviver.generation(
            keepsake.message, keepsake.request_id, wanted.tenant, wanted.ceilings
        )
        output = generation.output

        def told(of: Inheritance) -> AlreadyTold:
            return told_of(
                of,
                wanted.next_sequence,
                wanted.num_received,
                num_outputs=generation.sampling.num_outputs,
                max_tokens=generation.stopping.max_tokens,
                tells_prompt=output.echo or output.num_prompt_logprobs >= 0,
            )

        other = from_another_point(inheritance, wanted.next_sequence)
        if other is not None:
            with contextlib.suppress(RequestError):
                return other, generation, told(other)
        return inheritance, generation, told(inheritance)

    async def _revive(self, inheritance: Inheritance, wanted: Wanted) -> Resumable:
        """Let it go on here."""
        front, keepsake, log = self._front, inheritance.keepsake, inheritance.log
        if log is not None and log.is_ended:
            # Its end is known: from another point it begins again as any request of this front.
            kept = self._reviver.ended(ended_log(log), keepsake, wanted.tenant)
            front.resumptions.add(kept)
            return kept
        inheritance, generation, told = self._told(inheritance, wanted)
        request = LiveRequest(keepsake.request_id, generation, keepsake.arrival_s)
        front.table.add(request)
        try:
            await self._prepare(request, inheritance, told)
            front.table.add_outputs(request)
            messages = MessageLog(wanted.next_sequence)
            if inheritance.log is not None:
                messages = ended_log(inheritance.log)
            request.suspend(front.clock())
            resumable = self._reviver.resumable(request, messages, told)
            front.resumptions.add(resumable)
            front.replays.adopt(request, front.known_limits())
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
        limits = front.known_limits()
        prompt, prompt_text = await front.prompts.tokenise(generation, limits, is_replay=True)
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
        stop_ids = submission.specs[0].stop_ids
        texts = output_texts(generation, front.text, stop_ids)
        heard: dict[int, tuple[list[int], str]] = {}
        for index, ids in first_tokens(inheritance, told).items():
            deltas = [texts[index].push((token_id,)) for token_id in ids]
            if any(delta.stop is not None for delta in deltas):
                # It ended here by a stop string: it comes to its end once more, by itself.
                texts[index] = output_texts(generation, front.text, stop_ids)[index]
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
