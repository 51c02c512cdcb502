"""Encodes frames between processes as bytes, and decodes them. A frame is a header and a body;
msgspec encodes the body from a struct.

Defines the header, the limits, and the encoding of arrays. Each interface declares its frames as
structs; the encoding follows from their fields. Both ends run on one machine from one installation.
The encoding has a version and limits nevertheless, so that a connection between two versions, or
from an unrelated process, ends with a clear error.
"""

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

VERSION = 9
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest body of one frame, in bytes."""

# Length of the body in bytes, then VERSION.
_HEADER = struct.Struct("<IB")

FrameT = TypeVar("FrameT")


class FrameError(Exception):
    """The peer sent an invalid frame, or a frame would be too large."""


class TaggedFrame(
    msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True
):
    """Base class of all frames. A frame is encoded as an array: its tag, then its fields. The tag
    is the name of the class, unless the class sets `tag`.

    A field may have any type that msgspec supports, including dataclasses and enums, or be a
    one-dimensional array. `NDArray[np.int32]` is encoded as its memory and is read-only after
    decoding.
    """


class Codec(Generic[FrameT]):
    """Encodes and decodes the frames of one interface. `frames` is the union of their types."""

    def __init__(self, frames: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder: msgspec.msgpack.Decoder[FrameT] = msgspec.msgpack.Decoder(
            frames, dec_hook=_array_of
        )

    def encode(self, frame: FrameT) -> bytes:
        """Encode one frame, header included. Raises FrameError if it is too large."""
        body = self._encoder.encode(frame)
        if len(body) > MAX_FRAME_BYTES:
            raise FrameError(
                f"a frame of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}"
            )
        return _HEADER.pack(len(body), VERSION) + body

    def decode(self, body: bytes) -> FrameT:
        """Decode a body from `FrameBuffer.feed`. Raises FrameError if it is malformed."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"a malformed frame: {error}") from error


def _plain(value: Any) -> Any:
    """Return a numpy value as a type that msgspec can encode."""
    given: object = value
    if isinstance(given, np.ndarray) and value.ndim == 1:
        return np.ascontiguousarray(value).data
    if isinstance(given, np.generic):
        return value.item()
    raise NotImplementedError(f"a frame does not carry {type(value).__name__}")


def _array_of(annotation: Any, value: Any) -> Any:
    if type(value) is not bytes:
        raise ValueError("an array must be given as bytes")
    # NDArray[T] is np.ndarray[shape, np.dtype[T]].
    return np.frombuffer(value, dtype=annotation.__args__[1].__args__[0])


class FrameBuffer:
    """Splits a byte stream into frames."""

    __slots__ = ("_data", "_max_frame_bytes")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._data = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes, and yield the body of each frame that is complete.

        Raises FrameError for another version or an oversized frame, before the body arrives. After
        an error no more frames can be read from this connection, so the caller must close it.
        """
        buffer = self._data
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _HEADER.size:
                size, version = _HEADER.unpack_from(buffer, start)
                if version != VERSION:
                    raise FrameError(f"version {version} of the frames, expected {VERSION}")
                if size > self._max_frame_bytes:
                    raise FrameError(f"a frame of {size} bytes, at most {self._max_frame_bytes}")
                end = start + _HEADER.size + size
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[start + _HEADER.size : end])
                start = end
                yield body
        finally:
            del buffer[:start]
