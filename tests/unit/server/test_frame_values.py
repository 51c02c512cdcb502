"""Single values of frames: what is unknown stays unknown, and what is impossible is refused."""

import struct

import numpy as np
import pytest

from penstock.scheduler.events import Failed, Queued, StepEvents
from penstock.scheduler.request import FailureReason, RequestSpec
from penstock.server.link.frames import decode, encode
from penstock.server.link.spec_frames import Submit
from penstock.server.link.wire import FrameBuffer, LinkError


def test_what_is_not_known_of_a_refusal_is_not_known_at_the_other_end() -> None:
    ends = (
        Failed(key=1, at_s=0.0, reason=FailureReason.QUEUE_FULL),
        Failed(key=2, at_s=0.0, reason=FailureReason.QUEUE_FULL, estimate_s=0.0),
        Failed(key=3, at_s=0.0, reason=FailureReason.DEADLINE_UNREACHABLE, retry_after_s=2.5),
        Failed(key=4, at_s=0.0, reason=FailureReason.DEADLINE_UNREACHABLE, deadline_s=0.1),
    )
    waiting = tuple(
        Queued(key=key, at_s=1.0, num_ahead=key, estimated_queue_s=estimate_s)
        for key, estimate_s in ((1, None), (2, 0.0), (3, 12.5))
    )
    ((kind, body),) = FrameBuffer().feed(
        encode(StepEvents(step=1, at_s=1.0, changes=waiting, ends=ends))
    )
    frame = decode(kind, body)
    assert isinstance(frame, StepEvents)
    assert frame.changes == waiting
    assert frame.ends == ends


def test_a_key_that_is_not_positive_is_refused() -> None:
    spec = RequestSpec(key=7, request_id="r", prompt_ids=np.zeros(1, np.int32), max_tokens=1)
    ((kind, body),) = FrameBuffer().feed(encode(Submit(specs=(spec,))))
    forged = body.replace(struct.pack("<q", 7), struct.pack("<q", -1), 1)
    with pytest.raises(LinkError, match="key"):
        decode(kind, forged)
