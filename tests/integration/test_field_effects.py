"""Every field of a request has its documented effect, from the wire to the engine and back.

For each field two requests are sent that differ only in it, and the differences of their effects
are compared.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import text_format

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.request import (
    CacheRetention,
    Constraint,
    ConstraintKind,
    FinishReason,
    RequestSpec,
)
from penstock.server.front.config import FrontConfig
from penstock.server.rpc.mapping_in.generation import MAPPED_FIELDS
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import INFO, ServedFront, collect, flat_logprobs, rich_error, serving
from support.timeout import TEST_TIMEOUT_S, until_true

Seen = dict[str, Any]
DRAWN_TEXT = "The quality of mercy"
NOW_S = 1000.0
LONG = f'text_prompt {{ text: "{DRAWN_TEXT * 5}" }}'  # several blocks
CONFIG = FrontConfig(model_aliases=("alias",), acceptance_delay_s=0.0)


@dataclass(frozen=True)
class Case:
    """Two requests in protobuf text format, `before` and `after`, that differ only in the field at
    `path`. `effect`: all differences that result.
    """

    path: str
    after: str
    effect: Seen
    before: str = ""


def chat(role: str = "user", content: str = "x", end: str = "") -> str:
    return f"chat_prompt {{ {chat_message(content, role)} {end} }}"


def chat_message(content: str, role: str = "user") -> str:
    return f'messages {{ role: "{role}" parts {{ text: "{content}" }} }}'


def rendered(role: str = "user", content: str = "x") -> str:
    return f"<s><|im_start|>{role}\n{content}<|im_end|>\n"


def called(call_id: str = "1", name: str = "w", arguments: str = "") -> str:
    """Return a chat prompt with a message that calls a tool, in protobuf text format."""
    call = f'tool_calls {{ id: "{call_id}" name: "{name}" arguments {{ {arguments} }} }}'
    return f'chat_prompt {{ messages {{ role: "user" parts {{ text: "x" }} {call} }} }}'


def rendered_call(call_id: str = "1", name: str = "w", arguments: str = "{}") -> str:
    function = f'{{"name": "{name}", "arguments": {arguments}}}'
    call = f'[{{"id": "{call_id}", "type": "function", "function": {function}}}]'
    return rendered(content=f"x{call}") + ANSWER


def form(kind: ConstraintKind, *texts: str) -> Constraint:
    return Constraint(kind=kind, texts=texts)


ANSWER = "<|im_start|>assistant\n<think>"
CASES = [
    Case("model", 'model: "other"', {"rejected": "MODEL_NOT_FOUND"}),
    Case("request_id", 'request_id: "mine"', {"request_id": "mine", "accepted.id": "mine"}),
    Case("resume_timeout", "resume_timeout { seconds: 5 }", {"is_kept": True}),
    Case(
        "text_prompt.text",
        'text_prompt { text: "other" }',
        {"prompt": "<s>other"},
        before='text_prompt { text: "hello" }',
    ),
    Case(
        "text_prompt.add_special_tokens",
        'text_prompt { text: "hello" add_special_tokens: false }',
        {"prompt": "hello"},
        before='text_prompt { text: "hello" add_special_tokens: true }',
    ),
    Case(
        "token_prompt.ids",
        "token_prompt { ids: 3 ids: 0 }",
        {"prompt": "<|im_end|><s>"},
        before="token_prompt { ids: 0 ids: 3 }",
    ),
    Case(
        "chat_prompt.messages.role",
        chat(role="s"),
        {"prompt": rendered(role="s") + ANSWER},
        before=chat(role="u"),
    ),
    Case(
        "chat_prompt.messages.parts.text",
        chat(content='x" } parts { text: "y'),
        {"prompt": rendered(content="xy") + ANSWER},
        before=chat(),
    ),
    Case(
        "chat_prompt.messages.name",
        'chat_prompt { messages { role: "user" parts { text: "x" } name: "ann" } }',
        {"prompt": rendered(content="xann") + ANSWER, "num_hashes": 1},
        before=chat(),
    ),
    Case(
        "chat_prompt.messages.tool_call_id",
        'chat_prompt { messages { role: "user" parts { text: "x" } tool_call_id: "7" } }',
        {"prompt": rendered(content="x7") + ANSWER},
        before=chat(),
    ),
    Case(
        "chat_prompt.messages.tool_calls.id",
        called(call_id="2"),
        {"prompt": rendered_call(call_id="2")},
        before=called(),
    ),
    Case(
        "chat_prompt.messages.tool_calls.name",
        called(name="v"),
        {"prompt": rendered_call(name="v")},
        before=called(),
    ),
    Case(
        "chat_prompt.messages.tool_calls.arguments",
        called(arguments='fields { key: "a" value { number_value: 3 } }'),
        {"prompt": rendered_call(arguments='{"a": 3}')},
        before=called(),
    ),
    Case(
        "chat_prompt.tools",
        chat(end='tools { fields { key: "a" value { string_value: "<|im_end|>" } } }'),
        {"prompt": rendered().replace("<s>", '<s>[{"a": "<|im_end|>"}]') + ANSWER, "num_hashes": 2},
        before=chat(),
    ),
    Case(
        "chat_prompt.template_arguments",
        chat(end='template_arguments { fields { key: "mood" value { bool_value: true } } }'),
        {"prompt": rendered().replace("<s>", "<s>[True]") + ANSWER, "num_hashes": 1},
        before=chat(),
    ),
    Case(
        "chat_prompt.add_generation_prompt",
        chat(end="add_generation_prompt: false"),
        {"prompt": rendered()},
        before=chat(),
    ),
    Case("sampling.temperature", "sampling { temperature: 0.5 }", {"sampling.temperature": 0.5}),
    Case("sampling.top_k", "sampling { top_k: 5 }", {"sampling.top_k": 5}),
    Case("sampling.top_p", "sampling { top_p: 0.5 }", {"sampling.top_p": 0.5}),
    Case("sampling.min_p", "sampling { min_p: 0.25 }", {"sampling.min_p": 0.25}),
    Case(
        "sampling.repetition_penalty",
        "sampling { repetition_penalty: 1.5 }",
        {"sampling.repetition_penalty": 1.5},
    ),
    Case(
        "sampling.presence_penalty",
        "sampling { presence_penalty: 0.5 }",
        {"sampling.presence_penalty": 0.5},
    ),
    Case(
        "sampling.frequency_penalty",
        "sampling { frequency_penalty: -0.5 }",
        {"sampling.frequency_penalty": -0.5},
    ),
    Case(
        "sampling.logit_bias.token_id",
        "sampling { logit_bias { token_id: 3 bias: 1.5 } }",
        {"sampling.logit_bias": ((3, 1.5),)},
        before="sampling { logit_bias { token_id: 2 bias: 1.5 } }",
    ),
    Case(
        "sampling.logit_bias.bias",
        "sampling { logit_bias { token_id: 2 bias: -4 } }",
        {"sampling.logit_bias": ((2, -4.0),)},
        before="sampling { logit_bias { token_id: 2 bias: 1.5 } }",
    ),
    Case(
        "sampling.seed",
        "sampling { seed: 5 }",
        {"sampling.seed": 5, "seeds": [5], "accepted.seed": 5},
    ),
    Case(
        "sampling.num_outputs",
        "sampling { num_outputs: 2 }",
        {
            "seeds": [7, 5576936958904625109],
            "texts": [DRAWN_TEXT] * 2,
            "ends": [("LENGTH", "")] * 2,
        },
    ),
    Case("stopping.max_tokens", "stopping { max_tokens: 50 }", {"max_tokens": 50}),
    Case("stopping.min_tokens", "stopping { min_tokens: 40 }", {"min_tokens": 40}),
    Case(
        "stopping.min_tokens",
        'stopping { stop_strings: "qual" min_tokens: 40 }',
        {"min_tokens": 40, "texts": [DRAWN_TEXT], "ends": [("LENGTH", "")]},
        before='stopping { stop_strings: "qual" }',
    ),
    Case(
        "stopping.stop_strings",
        'stopping { stop_strings: "of mer" }',
        {"texts": ["The quality "], "ends": [("STOP", "of mer")]},
    ),
    Case(
        "stopping.stop_token_ids",
        "stopping { stop_token_ids: 5 }",
        {"stop_ids": (5, 1)},
    ),
    # Only the token limit ends the output, so the minimum equals the maximum.
    Case(
        "stopping.ignore_eos",
        "stopping { ignore_eos: true }",
        {"stop_ids": (), "min_tokens": 256},
    ),
    Case(
        "stopping.include_stop_string",
        'stopping { stop_strings: "of mer" include_stop_string: true }',
        {"texts": ["The quality of mer"]},
        before='stopping { stop_strings: "of mer" }',
    ),
    Case(
        "output.logprobs",
        "output { logprobs: 1 }",
        {"sampling.num_logprobs": 1, "records": [(True, 1)]},
    ),
    Case(
        "output.logprobs",
        "output { logprobs: 0 }",
        {"sampling.num_logprobs": 0, "records": [(True, 0)]},
    ),
    Case(
        "output.prompt_logprobs",
        "output { prompt_logprobs: 2 }",
        {
            "sampling.num_prompt_logprobs": 2,
            "prompt_records": [(False, 0), (True, 2)],
            "hash_salt": b"",  # every position is to be computed
        },
    ),
    Case("output.return_token_ids", "output { return_token_ids: true }", {"records": [(False, 0)]}),
    Case("output.echo", "output { echo: true }", {"echoed": "hello"}),
    Case(
        "output.min_chunk_tokens",
        "output { min_chunk_tokens: 2 max_chunk_delay { seconds: 10 } }",
        {"largest_chunk": 2},
        before="output { max_chunk_delay { seconds: 10 } }",
    ),
    Case(
        "output.max_chunk_delay",
        "output { min_chunk_tokens: 2 max_chunk_delay { } }",
        {"largest_chunk": 1},
        before="output { min_chunk_tokens: 2 max_chunk_delay { seconds: 10 } }",
    ),
    Case("scheduling.priority", "scheduling { priority: -5 }", {"priority": -5}),
    Case(
        "scheduling.ttft_timeout",
        "scheduling { ttft_timeout { seconds: 5 } }",
        {"ttft_deadline_s": NOW_S + 5},
    ),
    Case(
        "scheduling.total_timeout",
        "scheduling { total_timeout { seconds: 5 nanos: 500000000 } }",
        {"deadline_s": NOW_S + 5.5},
    ),
    Case(
        "scheduling.time_limit",
        "scheduling { time_limit { seconds: 5 } }",
        {"time_limit_s": NOW_S + 5},
    ),
    Case(
        "cache.salt",
        f'{LONG} cache {{ salt: "mine" }}',
        {"hash_salt": b"cmine"},
        before=LONG,
    ),
    Case(
        "chat_prompt.window_tokens",
        chat(content=DRAWN_TEXT, end=f"{chat_message('y')} window_tokens: 20"),
        {"prompt": rendered(content="y") + ANSWER, "accepted.dropped": 1, "num_hashes": 0},
        before=chat(content=DRAWN_TEXT, end=chat_message("y")),
    ),
    Case("cache.session_id", 'cache { session_id: "mine" }', {"session_id": "mine"}),
    Case(
        "cache.retention.level",
        "cache { retention { level: 90 } }",
        {"retention": CacheRetention(level=90)},
    ),
    Case(
        "cache.retention.duration",
        "cache { retention { duration { seconds: 60 } } }",
        {"retention": CacheRetention(duration_s=60.0)},
        before="cache { retention { } }",
    ),
    Case(
        "constraint.json_schema.schema",
        """constraint { json_schema { schema: '{"type": "object"}' } }""",
        {"constraint": form(ConstraintKind.JSON_SCHEMA, '{"type": "object"}')},
    ),
    Case(
        "constraint.regex.pattern",
        'constraint { regex { pattern: "[a-z]+" } }',
        {"constraint": form(ConstraintKind.REGEX, "[a-z]+")},
    ),
    Case(
        "constraint.grammar.ebnf",
        """constraint { grammar { ebnf: 'root ::= "a" | root "b"' } }""",
        {"constraint": form(ConstraintKind.GRAMMAR, 'root ::= "a" | root "b"')},
    ),
    Case(
        "constraint.choice.choices",
        'constraint { choice { choices: "yes" choices: "no" } }',
        {"constraint": form(ConstraintKind.CHOICE, "yes", "no")},
    ),
    Case(
        "adapter.name",
        f'{LONG} adapter {{ name: "poet" }}',
        {"adapter": "poet", "hash_salt": b"a\x04\x00\x00\x00poet"},
        before=LONG,
    ),
    Case(
        "adapter.scale",
        'adapter { name: "poet" scale: 0.5 }',
        {"rejected": "FEATURE_UNSUPPORTED"},
        before='adapter { name: "poet" scale: 1 }',
    ),
]


def request(words: str) -> pb.GenerateRequest:
    """Parse `words`, in protobuf text format. An absent prompt becomes "hello"; an absent request
    id and seed, for which a server would draw random values, become constants.
    """
    message = text_format.Parse(words, pb.GenerateRequest())
    if message.WhichOneof("prompt") is None:
        message.text_prompt.text = "hello"
    if not message.HasField("request_id"):
        message.request_id = "r"
    if not message.sampling.HasField("seed"):
        message.sampling.seed = 7
    return message


async def seen(served: ServedFront, words: str) -> Seen:
    """Return what the engine receives for a request and what its stream delivers, or the reason of
    its rejection.
    """
    call = served.stub.Generate(request(words))
    answer = asyncio.ensure_future(collect(call))
    submission = asyncio.ensure_future(served.port.next_submission())
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await asyncio.wait({answer, submission}, return_when=asyncio.FIRST_COMPLETED)
    if not submission.done():
        submission.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
        return {"rejected": rich_error(caught.value).info.reason}
    specs = submission.result()
    async with asyncio.timeout(TEST_TIMEOUT_S):
        for spec in specs:
            await play(served, spec)
    received = delivered(await answer)
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await served.server._wrapper.wait_until_idle()  # pyright: ignore[reportPrivateUsage]
    return given(served, specs) | received | {"is_kept": bool(served.server.front.results)}


async def play(served: ServedFront, spec: RequestSpec) -> None:
    """Act as an engine that generates the same text for every request, and wait until it is
    written.
    """
    port, sampling = served.port, spec.sampling
    port.admit(spec.key)
    if sampling.num_prompt_logprobs >= 0:
        port.emit(prompt_logprobs=[(spec.key, 1, flat_logprobs(spec.num_prompt_tokens - 1))])
    rows = flat_logprobs(1) if sampling.num_logprobs >= 0 else None
    output = served.server.front.table.output(spec.key)
    assert output is not None
    stream, chunks = output.request.stream, output.request.generation.output.chunks
    max_held = 0  # the first goes at once

    def is_written() -> bool:
        return stream.num_backlog_tokens <= max_held

    for token_id in served.encode(DRAWN_TEXT):
        port.emit(tokens=[(spec.key, token_id)], logprobs=rows)
        await until_true(is_written)
        max_held = chunks.min_tokens - 1 if chunks.is_holding else 0
    port.finish(spec.key)


def given(served: ServedFront, specs: tuple[RequestSpec, ...]) -> Seen:
    leader = specs[0]
    reported: Seen = {item.name: getattr(leader, item.name) for item in fields(leader)}
    del reported["key"], reported["prompt_ids"], reported["sampling"], reported["block_hashes"]
    hashes = hash_blocks(leader.prompt_ids, INFO.block_size, chain_root(leader.hash_salt))
    reported["num_hashes"] = len(leader.block_hashes)
    reported["are_hashes_of_salt"] = leader.block_hashes == hashes
    for item in fields(leader.sampling):
        reported[f"sampling.{item.name}"] = getattr(leader.sampling, item.name)
    # Special tokens are not skipped, as some fields concern them.
    tokenizer = served.server.front.text.files.tokenizer
    reported["prompt"] = tokenizer.decode(leader.prompt_ids.tolist(), skip_special_tokens=False)
    reported["seeds"] = [spec.sampling.seed for spec in specs]
    return reported


def delivered(responses: list[pb.GenerateResponse]) -> Seen:
    accepted, end = responses[0].accepted, responses[-1].finished
    texts = ["" for _ in end.outputs]
    records, prompt_records, echoed = set(), set(), ""
    for response in responses:
        tokens, prompt = response.tokens, response.prompt
        if response.WhichOneof("event") == "tokens":
            texts[tokens.output_index] += tokens.text
        echoed += prompt.text
        records |= {(r.HasField("logprob"), len(r.top_logprobs)) for r in tokens.records}
        prompt_records |= {(r.HasField("logprob"), len(r.top_logprobs)) for r in prompt.records}
    return {
        "rejected": "",
        "accepted.id": accepted.request_id,
        "accepted.dropped": accepted.num_dropped_messages,
        "accepted.seed": accepted.seed,
        "texts": texts,
        "ends": [
            (FinishReason(output.finish_reason).name, output.stop_string) for output in end.outputs
        ],
        "records": sorted(records),
        "prompt_records": sorted(prompt_records),
        "echoed": echoed,
        "largest_chunk": max(response.tokens.num_tokens for response in responses),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
async def test_a_field_has_its_effect_and_no_other(text: ModelText, case: Case) -> None:
    async with serving(text, CONFIG, clock=lambda: NOW_S) as served:
        before, after = await seen(served, case.before), await seen(served, case.after)
    assert not before["rejected"]
    assert before["are_hashes_of_salt"]
    changed = {name: value for name, value in after.items() if value != before[name]}
    assert changed == case.effect


def test_every_field_of_the_contract_has_a_case() -> None:
    assert {case.path for case in CASES} == MAPPED_FIELDS
