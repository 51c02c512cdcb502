"""Encodes requests of every kind, and mutates their bytes: flips bits, and removes, duplicates or
joins bytes.

A random seed determines the mutations.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from google.protobuf.message import Message

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_service_pb2 as model_pb
from penstock.v1.prompt_pb2 import ContentPart

_GENERATION: Final = "/penstock.v1.GenerationService/"
_MODEL: Final = "/penstock.v1.ModelService/"
MULTIPLEX: Final = _GENERATION + "Multiplex"
STREAMING: Final = frozenset(
    {_GENERATION + "Generate", _GENERATION + "Resume", "/grpc.health.v1.Health/Watch"}
)
_INTERESTING: Final = (0x00, 0x01, 0x7F, 0x80, 0xFF, 0x0A, 0x12, 0xFE)
_MAX_BYTES: Final = 4096


def generation() -> pb.GenerateRequest:
    """Return a request with most of its fields set."""
    request = pb.GenerateRequest(model="demo", request_id="a-request")
    request.chat_prompt.messages.add(
        role="user", parts=[ContentPart(text="Tell me of the sea. Zażółć gęślą jaźń.")]
    )
    request.sampling.temperature = 0.7
    request.sampling.top_k = 40
    request.sampling.top_p = 0.9
    request.sampling.seed = 7
    request.sampling.num_outputs = 2
    request.sampling.logit_bias.add(token_id=9, bias=-1.5)
    request.stopping.max_tokens = 4
    request.stopping.stop_strings.extend(["end", "\n\n"])
    request.stopping.stop_token_ids.extend([3, 4])
    request.output.logprobs = 2
    request.output.return_token_ids = True
    request.output.max_chunk_delay.FromMilliseconds(5)
    request.scheduling.priority = 3
    request.scheduling.total_timeout.FromSeconds(20)
    request.cache.salt = "salt"
    request.cache.session_id = "conversation"
    request.cache.retention.level = 50
    request.constraint.choice.choices.extend(["yes", "no"])
    return request


def seeds() -> dict[str, list[bytes]]:
    """Return valid encoded messages by the path of the method that receives them."""
    text = pb.GenerateRequest()
    text.text_prompt.text = "hello"
    text.stopping.max_tokens = 3
    ids = pb.GenerateRequest()
    ids.token_prompt.ids.extend([5, 6, 7])
    ids.stopping.max_tokens = 3
    generations = [generation(), text, ids]
    tokenize = model_pb.TokenizeRequest(model="demo")
    tokenize.text_prompt.text = "some words"
    conversation = model_pb.TokenizeRequest(model="demo")
    conversation.chat_prompt.messages.add(role="user", parts=[ContentPart(text="hello")])
    detokenize = model_pb.DetokenizeRequest(model="demo", token_ids=[5, 6, 7])
    commands = [
        *(
            pb.MultiplexRequest(submit=pb.MultiplexSubmit(key=1, generation=one))
            for one in generations
        ),
        pb.MultiplexRequest(cancel=pb.MultiplexCancel(key=1)),
        pb.MultiplexRequest(credit=pb.MultiplexCredit(key=1, num_credit_tokens=5)),
    ]
    messages: dict[str, Sequence[Message]] = {
        _GENERATION + "Generate": generations,
        _GENERATION + "GenerateOnce": [
            pb.GenerateOnceRequest(generation=one) for one in generations
        ],
        _GENERATION + "Resume": [pb.ResumeRequest(request_id="a-request", next_sequence=2)],
        _GENERATION + "Cancel": [pb.CancelRequest(request_id="a-request")],
        MULTIPLEX: commands,
        _MODEL + "ListModels": [model_pb.ListModelsRequest(page_size=5, page_token="x")],
        _MODEL + "GetModel": [model_pb.GetModelRequest(name="demo")],
        _MODEL + "Tokenize": [tokenize, conversation],
        _MODEL + "Detokenize": [detokenize],
    }
    found = {path: [one.SerializeToString() for one in some] for path, some in messages.items()}
    found["/grpc.health.v1.Health/Check"] = [b"", b"\x0a\x04none"]
    found["/grpc.health.v1.Health/Watch"] = [b""]
    return found


def mutated(data: bytes, draw: random.Random, others: Mapping[int, bytes] | None = None) -> bytes:
    """Return `data` after one to four random changes, truncated to 4 KiB. `others`: messages that
    may be joined to it.
    """
    result = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        _change(result, draw, others or {0: data})
    return bytes(result[:_MAX_BYTES])


def _change(data: bytearray, draw: random.Random, others: Mapping[int, bytes]) -> None:
    start = draw.randint(0, len(data))
    end = min(len(data), start + draw.randint(1, 16))
    match draw.randrange(7):
        case 0 if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 1 if data:
            data[draw.randrange(len(data))] = draw.choice(_INTERESTING)
        case 2:
            data[start:start] = draw.randbytes(draw.randint(1, 8))
        case 3:
            del data[start:end]
        case 4:
            data[start:start] = data[start:end] * draw.randint(1, 20)
        case 5:
            del data[start:]
        case _:
            data += draw.choice(list(others.values()))
