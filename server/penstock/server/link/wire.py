"""Bytes on the link: how numbers, text and arrays are laid out, and where a frame ends.

Owns the primitive encoding (little endian, fixed widths, arrays as raw memory) and the frame
header. Does not know what any frame means. Both ends run on one machine from one installation, so
the encoding is plain; it is still versioned and bounded, because a mixed restart or a stray
connection must end in a clear error.
"""

import struct
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

VERSION = 6
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest body of one frame, in bytes."""

_HEADER = struct.Struct("<IBBH")
_U8 = struct.Struct("<B")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")

ScalarT = TypeVar("ScalarT", bound=np.generic)


class LinkError(Exception):
    """The other end sent something that is no frame, or a frame would be too large."""


class Writer:
    """Collects the body of one frame."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def u8(self, value: int) -> None:
        """One byte, 0..255."""
        self._parts.append(_U8.pack(value))

    def u32(self, value: int) -> None:
        """An unsigned number below 2**32."""
        self._parts.append(_U32.pack(value))

    def i64(self, value: int) -> None:
        """A signed 64-bit number."""
        self._parts.append(_I64.pack(value))

    def u64(self, value: int) -> None:
        """An unsigned 64-bit number."""
        self._parts.append(_U64.pack(value))

    def f64(self, value: float) -> None:
        """A float, exactly; infinities and NaN included."""
        self._parts.append(_F64.pack(value))

    def packed(self, layout: struct.Struct, *values: int | float) -> None:
        """A fixed record in one go."""
        self._parts.append(layout.pack(*values))

    def blob(self, value: bytes) -> None:
        """Bytes with their length in front."""
        self._parts.append(_U32.pack(len(value)))
        self._parts.append(value)

    def text(self, value: str) -> None:
        """UTF-8 with its length in front."""
        self.blob(value.encode())

    def array(self, values: NDArray[ScalarT], dtype: type[ScalarT]) -> None:
        """The raw elements; their number is written elsewhere."""
        self._parts.append(np.ascontiguousarray(values, dtype=dtype).tobytes())

    def frame(self, kind: int) -> bytes:
        """Header and body as one bytes value. Raises LinkError above MAX_FRAME_BYTES."""
        size = sum(map(len, self._parts))
        if size > MAX_FRAME_BYTES:
            raise LinkError(f"a frame of {size} bytes is above the limit of {MAX_FRAME_BYTES}")
        return b"".join((_HEADER.pack(size, VERSION, kind, 0), *self._parts))


class Reader:
    """Takes one frame's body apart; every read is checked against what is left."""

    __slots__ = ("_body", "_offset")

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._offset = 0

    def _advance(self, num_bytes: int) -> int:
        start = self._offset
        if num_bytes > len(self._body) - start:
            raise LinkError("a frame ends in the middle of a value")
        self._offset = start + num_bytes
        return start

    def u8(self) -> int:
        """One byte."""
        return self._body[self._advance(1)]

    def u32(self) -> int:
        """An unsigned 32-bit number."""
        value: int = _U32.unpack_from(self._body, self._advance(4))[0]
        return value

    def i64(self) -> int:
        """A signed 64-bit number."""
        value: int = _I64.unpack_from(self._body, self._advance(8))[0]
        return value

    def u64(self) -> int:
        """An unsigned 64-bit number."""
        value: int = _U64.unpack_from(self._body, self._advance(8))[0]
        return value

    def f64(self) -> float:
        """A float."""
        value: float = _F64.unpack_from(self._body, self._advance(8))[0]
        return value

    def packed(self, layout: struct.Struct) -> tuple[int | float, ...]:
        """A fixed record."""
        return layout.unpack_from(self._body, self._advance(layout.size))

    def blob(self) -> bytes:
        """Bytes with their length in front."""
        size = self.u32()
        start = self._advance(size)
        return self._body[start : start + size]

    def text(self) -> str:
        """UTF-8 text; LinkError when it is none."""
        try:
            return self.blob().decode()
        except UnicodeDecodeError as error:
            raise LinkError("a text in a frame is not UTF-8") from error

    def array(self, count: int, dtype: type[ScalarT]) -> NDArray[ScalarT]:
        """`count` elements as an array of its own (a view would keep the whole frame alive)."""
        start = self._advance(count * np.dtype(dtype).itemsize)
        return np.frombuffer(self._body, dtype=dtype, count=count, offset=start).copy()

    def matrix(self, rows: int, columns: int, dtype: type[ScalarT]) -> NDArray[ScalarT]:
        """`rows` x `columns` elements, row by row."""
        return self.array(rows * columns, dtype).reshape(rows, columns)

    def end(self) -> None:
        """Raises LinkError when bytes are left over."""
        if self._offset != len(self._body):
            raise LinkError(f"{len(self._body) - self._offset} bytes too many in a frame")


class FrameBuffer:
    """Cuts a byte stream into frames."""

    __slots__ = ("_data", "_max_frame_bytes")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._data = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add bytes; yields (kind, body) of every frame that is now whole.

        Raises LinkError on a foreign version or an oversized frame, before its body arrives.
        Afterwards the stream is out of step: hang up.
        """
        buffer = self._data
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _HEADER.size:
                size, version, kind, _ = _HEADER.unpack_from(buffer, start)
                if version != VERSION:
                    raise LinkError(f"link version {version}, expected {VERSION}")
                if size > self._max_frame_bytes:
                    raise LinkError(f"a frame of {size} bytes, at most {self._max_frame_bytes}")
                end = start + _HEADER.size + size
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[start + _HEADER.size : end])
                start = end
                yield kind, body
        finally:
            del buffer[:start]
