"""Messages between the processes of a load, over a pipe of `multiprocessing`.

Owns waiting for them on an event loop. Does not know what they say.
"""

import asyncio
from multiprocessing.connection import Connection
from typing import Any


class MessagePipe:
    """One end. Values are pickled; both ends are ours."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        """Send; blocks only while the other end reads nothing. Raises OSError when it is gone."""
        self._connection.send(message)

    async def receive(self) -> Any:
        """The next message. Raises EOFError when the other end is gone."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        number = self._connection.fileno()
        loop.add_reader(number, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(number)
        try:
            return self._connection.recv()
        except ConnectionResetError:
            raise EOFError from None

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
