"""The frames by which a running process is looked into: its live requests, and orders to it.

Owns the values and how they are written and read. Orders go to engines and fronts alike. Does not
know who carries them out.
"""

import enum
import struct
from dataclasses import dataclass

from penstock.scheduler.events import WaitReason
from penstock.scheduler.live_view import LiveView
from penstock.scheduler.state import RequestState
from penstock.server.link.wire import LinkError, Reader, Writer

_NO_POSITION = -1
_VIEW = struct.Struct("<qIBBqddQQQQQqq")
"""The numbers of a view: as `_write_view` lists them."""


class OrderVerb(enum.IntEnum):
    """What a process can be told to do besides its work."""

    LOG_LEVEL = 1
    """Log what is at least as grave as the argument, the name of a level."""
    PROFILE = 2
    """Sample its threads for as many seconds as the argument says; the answer is a speedscope
    file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Which requests live? `ticket` (32 bits) comes back in the answer."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAnswer:
    """Every output that has not ended, as the engine sees it."""

    ticket: int
    views: tuple[LiveView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`ticket` (32 bits) comes back in the answer."""

    ticket: int
    verb: OrderVerb
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderAnswer:
    """`problem`: why it could not be done, empty when it was; `payload`: what came of it."""

    ticket: int
    problem: str = ""
    payload: bytes = b""


def write_order(out: Writer, order: Order) -> None:
    """The body of an order."""
    out.u32(order.ticket)
    out.u8(order.verb)
    out.text(order.argument)


def read_order(data: Reader) -> Order:
    """The order again. Raises ValueError for an unknown verb."""
    return Order(ticket=data.u32(), verb=OrderVerb(data.u8()), argument=data.text())


def write_order_answer(out: Writer, answer: OrderAnswer) -> None:
    """The body of an answer."""
    out.u32(answer.ticket)
    out.text(answer.problem)
    out.blob(answer.payload)


def read_order_answer(data: Reader) -> OrderAnswer:
    """The answer again."""
    return OrderAnswer(ticket=data.u32(), problem=data.text(), payload=data.blob())


def write_look_answer(out: Writer, answer: LookAnswer) -> None:
    """The body of an answer: how many, then each."""
    out.u32(answer.ticket)
    out.u32(len(answer.views))
    for view in answer.views:
        _write_view(out, view)


def read_look_answer(data: Reader) -> LookAnswer:
    """The answer again. Raises LinkError or ValueError for what is none."""
    ticket, num_views = data.u32(), data.u32()
    return LookAnswer(ticket=ticket, views=tuple(_read_view(data) for _ in range(num_views)))


def _write_view(out: Writer, view: LiveView) -> None:
    out.packed(
        _VIEW,
        view.key,
        view.output_index,
        view.state,
        view.waits_for or 0,
        view.priority,
        view.arrival_s,
        view.deadline_s,
        view.num_prompt_tokens,
        view.num_output_tokens,
        view.num_computed_tokens,
        view.num_blocks,
        view.num_preemptions,
        view.slot,
        _NO_POSITION if view.queue_position is None else view.queue_position,
    )
    out.text(view.request_id)
    out.text(view.tenant)
    out.blob(view.trace_id)


def _read_view(data: Reader) -> LiveView:
    numbers = data.packed(_VIEW)
    key, output_index, state, waits_for, priority = map(int, numbers[:5])
    arrival_s, deadline_s = numbers[5:7]
    num_prompt, num_output, num_computed, num_blocks, num_preempted = map(int, numbers[7:12])
    slot, position = map(int, numbers[12:])
    return LiveView(
        key=key,
        request_id=data.text(),
        tenant=data.text(),
        trace_id=_trace_id(data.blob()),
        output_index=output_index,
        state=RequestState(state),
        waits_for=WaitReason(waits_for) if waits_for else None,
        priority=priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_computed_tokens=num_computed,
        num_blocks=num_blocks,
        num_preemptions=num_preempted,
        slot=slot,
        queue_position=None if position == _NO_POSITION else position,
    )


def _trace_id(data: bytes) -> bytes:
    if len(data) not in (0, 16):
        raise LinkError(f"a trace id of {len(data)} bytes")
    return data
