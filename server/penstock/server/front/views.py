"""A live request as operators see it: conversion to a `FrontView`; pure."""

from penstock.server.front.live_request import LiveRequest
from penstock.server.observe.frames import FrontView


def view_of(request: LiveRequest, front_id: int) -> FrontView:
    """The view of `request` now."""
    marks = request.phases.marks
    return FrontView(
        front_id=front_id,
        keys=tuple(output.key for output in request.outputs),
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.generation.urgency.priority,
        trace_id=request.trace_id.hex(),
        arrival_s=request.arrival_s,
        phase=marks[-1].kind,
        history=tuple((mark.kind, mark.since_s) for mark in marks),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        num_preemptions=request.num_preemptions,
        num_backlog_tokens=request.stream.num_backlog_tokens,
    )
