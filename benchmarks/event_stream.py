"""A minimal HTTP/1.1 client for OpenAI-compatible chat completions, streamed as server-sent events.

It parses only headers, chunk sizes, event lines and the JSON, so that the figures do not include
the cost of a client library.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

_LIMIT_S = 60.0
_EMPTY = '"content":""'


class StreamFailed(Exception):
    """The call failed; the message contains the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The result of a call. `ttft_s`: seconds to the first text; 0 without text. The token counts
    are reported by the gateway.
    """

    ttft_s: float
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


class Caller:
    """Sends calls one after another on one connection, and keeps it open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def chat(self, messages: list[dict[str, str]], max_tokens: int, model: str) -> Answered:
        """Send a conversation; read the streamed response and return it. Raises StreamFailed."""
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await self._call(body)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.close()
            raise StreamFailed(f"{type(error).__name__}: {error}") from error
        except StreamFailed:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _call(self, body: dict[str, Any]) -> Answered:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        data = json.dumps(body).encode()
        began_s = time.perf_counter()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        )
        status, length = await _head(reader)
        if status != 200:
            raise StreamFailed(f"{status}: {(await reader.readexactly(length)).decode()[:300]}")
        ttft_s, texts, usage = 0.0, list[str](), dict[str, Any]()
        async with aclosing(_events(reader)) as events:
            async for event in events:
                if '"error"' in event:
                    raise StreamFailed(event[:300])
                if not ttft_s and '"content":' in event and _EMPTY not in event:
                    ttft_s = time.perf_counter() - began_s
                document = json.loads(event)
                usage = document.get("usage") or usage
                texts += [one["delta"].get("content") or "" for one in document["choices"]]
        details = usage.get("prompt_tokens_details") or {}
        return Answered(
            ttft_s=ttft_s,
            text="".join(texts),
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=details.get("cached_tokens", 0),
            num_completion_tokens=usage["completion_tokens"],
        )


async def _head(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Return the status code, and the content length (0 without the header)."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    length = 0
    for line in head[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return int(head[0].split()[1]), length


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readline()
    await reader.readline()


async def _events(reader: asyncio.StreamReader) -> AsyncGenerator[str]:
    """Yield the data of each event except the last, which marks the end of the stream."""
    rest = b""
    async for chunk in _chunks(reader):
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                yield event[6:].decode()
