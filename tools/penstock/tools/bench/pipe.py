"""Messages between the processes of the load generator: a `multiprocessing` pipe for use on an
event loop.
"""

import asyncio
from multiprocessing.connection import Connection
from typing import Any


class MessagePipe:
    """One end of a pipe between two processes. Values are pickled, which is safe because both ends
    run this program.
    """

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        """Send a message; blocks while the pipe is full. Raises OSError when the other end is
        closed.
        """
        self._connection.send(message)

    async def receive(self) -> Any:
        """Wait for the next message and return it. Raises EOFError when the other end is closed."""
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
