"""Secrets that clients send (canaries), requests that contain them, and a search for them in the
outputs of a service.

A text is searched for verbatim. Token ids are searched for as text, as integers in memory and as
protobuf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1.prompt_pb2 import ContentPart
from support import request_edits as edit

IDS = (397, 401, 389, 383, 379, 373, 367, 359)
"""A prompt that no other client sends."""
TAKEN = frozenset({"role", "unknown field"})
"""Of the requests of `rejected_requests`, those that a plain model accepts."""
POISON, DEADLY = 349, 347
"""Tokens of a prompt: the first fails its request alone, the second kills the executor."""
_PLACES = (
    *("text", "chat", "role", "stop", "schema", "regex", "grammar", "choice", "salt", "session"),
    *("model", "adapter", "mime", "authorization", "cookie", "baggage", "custom", "malformed"),
    *("unknown", "path", "credit"),
)
WORDS = {place: f"Kanarie {place} zingt zachtjes" for place in _PLACES}
"""The text of each place; `sought` searches for its first two words."""


@dataclass(frozen=True)
class Leak:
    """A canary that was found. `place`: the canary's name. `where`: the source in which it was
    found; `around`: the bytes around it.
    """

    place: str
    where: str
    around: bytes


def find(sources: dict[str, bytes], words: dict[str, bytes]) -> list[Leak]:
    """Return the first occurrence of each canary of `words` in each source."""
    return [
        Leak(place, where, data[max(0, data.index(word) - 60) :][:160])
        for where, data in sources.items()
        for place, word in words.items()
        if word in data
    ]


def sought() -> dict[str, bytes]:
    """Return the canaries to search for, by name."""
    words = {place: f"Kanarie {place}".encode() for place in WORDS}
    return words | dict(forms_of_ids("ids", IDS))


def forms_of_ids(name: str, ids: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of every four consecutive ids in each encoding: text, integers in memory,
    protobuf.
    """
    for start in range(len(ids) - 3):
        four = ids[start : start + 4]
        for sign in (", ", ",", " ", "\n"):
            yield f"{name} {start} by {sign!r}", sign.join(map(str, four)).encode()
        for kind in ("<i4", "<i8", "<u2"):
            yield f"{name} {start} as {kind}", np.array(four, dtype=kind).tobytes()
        packed = pb.GenerateRequest()
        packed.token_prompt.ids.extend(four)
        yield f"{name} {start} packed", packed.token_prompt.SerializeToString()[2:]


def metadata() -> tuple[tuple[str, str], ...]:
    """Return metadata with credentials and other canaries."""
    return (
        ("authorization", f"Bearer {WORDS['authorization']}"),
        ("cookie", WORDS["cookie"]),
        ("baggage", f"prompt={WORDS['baggage']}"),
        ("x-custom", WORDS["custom"]),
    )


def text_request(num_tokens: int) -> pb.GenerateRequest:
    """Return a request with a text prompt, a stop string, a salt and a session, all canaries."""
    message = pb.GenerateRequest()
    message.text_prompt.text = WORDS["text"]
    message.sampling.temperature = 0.0
    message.stopping.max_tokens = num_tokens
    message.stopping.ignore_eos = True
    message.stopping.stop_strings.append(WORDS["stop"])
    message.cache.salt = WORDS["salt"]
    message.cache.session_id = WORDS["session"]
    return message


def chat_request(num_tokens: int) -> pb.GenerateRequest:
    message = text_request(num_tokens)
    message.chat_prompt.messages.add(role="user", parts=[ContentPart(text=WORDS["chat"])])
    return message


def ids_request(num_tokens: int, *more: int) -> pb.GenerateRequest:
    message = text_request(num_tokens)
    message.token_prompt.ids.extend((*IDS, *more))
    return message


def rejected_requests() -> dict[str, pb.GenerateRequest | bytes]:
    """Return requests with canaries, by name. All are rejected, except those in `TAKEN`."""
    image = {"role": "user", "parts": [{"image": {"mime_type": WORDS["mime"]}}]}
    edits: dict[str, edit.Edit] = {
        "model": edit.merging(model=WORDS["model"]),
        "role": edit.chat((WORDS["role"], "x")),
        "schema": edit.schema(f'{{"title": "{WORDS["schema"]}"}}'),
        "broken schema": edit.schema(f"{{{WORDS['schema']}"),
        "regex": edit.regex(WORDS["regex"] + "("),
        "grammar": edit.grammar(WORDS["grammar"]),
        "choice": edit.choices(WORDS["choice"]),
        "adapter": edit.adapter(WORDS["adapter"]),
        "image": edit.merging(chat_prompt={"messages": [image]}),
        "long": edit.merging(text_prompt={"text": WORDS["text"] * 2000}),
        "temperature": edit.put("sampling", "temperature", -1.0),
        "tokens": edit.tokens(*IDS, 2**31 - 1),
    }
    reported: dict[str, pb.GenerateRequest | bytes] = {}
    for name, apply in edits.items():
        message = text_request(3)
        apply(message)
        reported[name] = message
    reported["malformed"] = b"\x0a\xff\xff\xff\x7f" + WORDS["malformed"].encode()
    unknown = WORDS["unknown"].encode()
    # Field 2000, a string: from a client of another version.
    reported["unknown field"] = text_request(3).SerializeToString() + (
        b"\x82\x7d" + bytes([len(unknown)]) + unknown
    )
    return reported
