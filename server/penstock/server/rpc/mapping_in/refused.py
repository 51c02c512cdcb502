"""What the contract offers and this server does not do yet: refused by name, never ignored.

Owns the table of such fields; what depends on the executor is refused where the field is read.
`ModelFeatures` is published from the same facts
(`penstock.server.rpc.mapping_model`).
"""

from collections.abc import Mapping
from typing import Final, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.parsing import is_repeated
from penstock.v1.generation_service_pb2 import GenerateRequest

REFUSED_FIELDS: Final[Mapping[str, str]] = {
    "images": "images",
}
"""Path in GenerateRequest -> feature, as told in ErrorInfo.metadata."""


def check_refused(request: GenerateRequest, violations: Violations) -> None:
    """Note every field of the table that the request sets."""
    for path, feature in REFUSED_FIELDS.items():
        if _is_set(request, path):
            violations.require_feature(feature, path, is_supported=False)


def _is_set(message: Message, path: str) -> bool:
    """Whether the field at `path` was sent; an empty message counts, an empty list does not."""
    name, _, rest = path.partition(".")
    field = cast(FieldDescriptor, message.DESCRIPTOR.fields_by_name[name])
    if is_repeated(field):
        return len(getattr(message, name)) > 0
    if not message.HasField(name):
        return False
    return _is_set(getattr(message, name), rest) if rest else True
