"""Messages between the processes of a load generator, over a `multiprocessing` pipe.

Owns waiting for them on an event loop. Does not interpret them.
"""

import asyncio
from multiprocessing.connection import Connection
from typing import Any


class MessagePipe:
    """One end of the pipe. Values are pickled, which is safe because both ends are this program."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        """Send; blocks while the pipe is full. Raises OSError when the other end is closed."""
        self._connection.send(message)

    async def receive(self) -> Any:
        """Return the next message. Raises EOFError when the other end is closed."""
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
        """Close this end."""
        self._connection.close()
