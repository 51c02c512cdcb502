"""A model's tokenizer as one archive, for a gateway that has no copy of the model.

Owns which files go along and the form of the archive. The same files make the same bytes on every
machine, so that a digest names a tokenizer.
"""

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.server.front.errors import ErrorReason, refuse

CHUNK_BYTES: Final = 64 << 10
MAX_FILES: Final = 50
MAX_BUNDLE_BYTES: Final = 200 << 20
MAX_UNPACKED_BYTES: Final = 500 << 20
"""What gateways take; a model of ours has a tenth of it."""
_NAMES: Final = frozenset(
    {
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)
_PLAIN_FILE: Final = 0o100644 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBundle:
    """A zip archive and the SHA-256 of its bytes, in hexadecimal."""

    data: bytes
    sha256: str


def make_bundle(folder: Path) -> TokenizerBundle:
    """The tokenizer in `folder`. Takes as long as reading and packing does: not on an event loop.

    Raises RequestError NOT_POSSIBLE_NOW where it is too large; OSError where it cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.name in _NAMES and path.is_file())
    if len(files) > MAX_FILES or sum(path.stat().st_size for path in files) > MAX_UNPACKED_BYTES:
        raise _too_large()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.name, date_time=_LONG_AGO)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = _PLAIN_FILE
            entry.create_system = 3
            archive.writestr(entry, path.read_bytes(), compresslevel=6)
    data = packed.getvalue()
    if len(data) > MAX_BUNDLE_BYTES:
        raise _too_large()
    return TokenizerBundle(data=data, sha256=hashlib.sha256(data).hexdigest())


def _too_large() -> Exception:
    return refuse(ErrorReason.NOT_POSSIBLE_NOW, "the tokenizer is too large to be handed over")
