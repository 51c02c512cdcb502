"""SUBMIT: the outputs of one request.

The first output is sent in full, each other as its difference from the first, so that a prompt or
the schema of a constraint is sent once. Does not validate requests: the front did.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias, get_type_hints

import msgspec
import numpy as np

from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.request import RequestSpec
from penstock.server.link.resume_frames import KeptRequest
from penstock.server.link.wire import TaggedFrame

TRACE_ID_BYTES = 16

_NAMES = tuple(field.name for field in fields(RequestSpec))

# The fields of RequestSpec, each of which may be left out.
_make_difference: Any = msgspec.defstruct(
    "Difference",
    [
        (name, hint | msgspec.UnsetType, msgspec.UNSET)
        for name, hint in get_type_hints(RequestSpec).items()
    ],
    frozen=True,
    forbid_unknown_fields=True,
)
if TYPE_CHECKING:
    _Difference: TypeAlias = Any
else:
    _Difference = _make_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """The outputs of one request, leader first. `kept` None: it ends with its front.

    Without outputs it has ended, and only its stream is kept.
    """

    specs: tuple[RequestSpec, ...]
    kept: KeptRequest | None = None


class SubmitFrame(TaggedFrame, frozen=True, eq=False, tag="Submit"):
    """A `Submit` in its encoded form."""

    leader: RequestSpec | None
    others: tuple[_Difference, ...]
    kept: KeptRequest | None = None

    @classmethod
    def of(cls, submit: Submit) -> "SubmitFrame":
        """The frame of `submit`. Raises ValueError for an id or a digest of a wrong length."""
        if not submit.specs:
            return cls(None, (), submit.kept)
        leader, *others = submit.specs
        _check_lengths(submit.specs)
        return cls(leader, tuple(_difference(other, leader) for other in others), submit.kept)

    def value(self) -> Submit:
        """The request again; shared parts are the same object. Raises ValueError like `of`."""
        leader = self.leader
        if leader is None:
            return Submit(specs=(), kept=self.kept)
        others = (replace(leader, **_given(other)) for other in self.others)
        specs = (leader, *others)
        _check_lengths(specs)
        return Submit(specs=specs, kept=self.kept)


def _difference(spec: RequestSpec, leader: RequestSpec) -> _Difference:
    changed: dict[str, Any] = {}
    for name in _NAMES:
        value, shared = getattr(spec, name), getattr(leader, name)
        if value is not shared and (isinstance(value, np.ndarray) or value != shared):
            changed[name] = value
    return _make_difference(**changed)


def _given(difference: _Difference) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.structs.asdict(difference)
    return {name: value for name, value in values.items() if value is not msgspec.UNSET}


def _check_lengths(specs: Sequence[RequestSpec]) -> None:
    """Of ids and digests; those that outputs share are checked once."""
    for trace_id in {spec.trace_id for spec in specs}:
        if len(trace_id) not in (0, TRACE_ID_BYTES):
            raise ValueError(f"trace_id must be {TRACE_ID_BYTES} bytes long, not {len(trace_id)}")
    for hashes in {id(spec.block_hashes): spec.block_hashes for spec in specs}.values():
        if hashes and set(map(len, hashes)) != {DIGEST_BYTES}:
            raise ValueError(f"every block hash must be {DIGEST_BYTES} bytes long")
