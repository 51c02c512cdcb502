"""The stand-in's samplers and guides: what they honour and what they ignore without a word."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_trtllm import FakeEngines, tokens_of, write_model_folder
from support.fake_trtllm import fake_engines as fake_engines  # fixtures
from support.fake_trtllm import fake_trtllm as fake_trtllm
from support.tiny_tokenizers import byte_level


async def test_a_bias_forces_and_bans(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    (free,) = await fake_engines.run_all(llm, [[5]])
    force, ban = [0.0] * 128, [0.0] * 128
    force[77] = 100.0
    ban[free[0]] = -100.0

    forced = llm.generate_async([5], fake_engines.params(embedding_bias=force))
    banned = llm.generate_async([5], fake_engines.params(embedding_bias=ban))
    bad = llm.generate_async([5], fake_engines.params(bad_token_ids=[free[0]]))
    fake_engines.control.step(8)

    assert await tokens_of(forced) == [77] * 8
    assert free[0] not in await tokens_of(banned)
    assert free[0] not in await tokens_of(bad)


async def sampled(engines: FakeEngines, llm: Any, **changes: Any) -> list[int]:
    result = llm.generate_async([5, 6], engines.params(**{"temperature": 1.0, **changes}))
    engines.control.step(8)
    return await tokens_of(result)


async def test_what_the_default_sampler_ignores(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    end = (await fake_engines.run_all(llm, [[5, 6]]))[0][2]
    early: dict[str, Any] = {"temperature": 0.0, "end_id": end, "ignore_eos": False}
    plain = await sampled(fake_engines, llm, temperature=0.0)

    assert await sampled(fake_engines, llm, seed=1) != await sampled(fake_engines, llm, seed=1)
    assert plain == await sampled(fake_engines, llm, temperature=0.0, presence_penalty=50.0)
    assert len(await sampled(fake_engines, llm, **early, min_tokens=2)) <= 3
    assert len(await sampled(fake_engines, llm, **early, min_tokens=20)) == 8


async def test_what_the_old_sampler_honours(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(sampler_type="TRTLLMSampler")
    end = (await fake_engines.run_all(llm, [[5, 6]]))[0][2]
    early: dict[str, Any] = {"temperature": 0.0, "end_id": end, "ignore_eos": False}
    biased = [0.0] * 128
    biased[7] = 9.0

    assert await sampled(fake_engines, llm, seed=1) == await sampled(fake_engines, llm, seed=1)
    assert await sampled(fake_engines, llm, seed=1) != await sampled(fake_engines, llm, seed=2)
    assert await sampled(fake_engines, llm) == await sampled(fake_engines, llm, seed=0)
    assert await sampled(fake_engines, llm, temperature=0.0, embedding_bias=biased) == [7] * 8
    penalised = await sampled(
        fake_engines, llm, temperature=0.0, embedding_bias=biased, presence_penalty=50.0
    )
    assert len(set(penalised)) == 8
    assert len(await sampled(fake_engines, llm, **early, min_tokens=6)) >= 6


async def test_unset_temperature_top_p_and_top_k_mean_greedy(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    greedy = await sampled(fake_engines, llm, temperature=0.0)

    assert await sampled(fake_engines, llm, temperature=None) == greedy
    assert await sampled(fake_engines, llm, top_k=1) == greedy
    assert await sampled(fake_engines, llm, top_p=0.0) == greedy
    assert await sampled(fake_engines, llm, top_p=1e-6) == greedy
    assert await sampled(fake_engines, llm, temperature=None, top_p=1.0) != greedy


async def test_logprobs_are_cumulative_and_hold_the_chosen_token(
    fake_engines: FakeEngines,
) -> None:
    llm = fake_engines.build()
    result = llm.generate_async([5], fake_engines.params(logprobs=3), streaming=True)
    fake_engines.control.step(8)
    output = result.outputs[0]
    async for _ in result:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        assert len(output.logprobs_diff) == 1
    assert output.logprobs is not None
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entry) == 3
        assert entry[token].rank == 1
        assert entry[token].logprob == max(found.logprob for found in entry.values())
    assert output.cumulative_logprob == pytest.approx(
        sum(
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        )
    )


@pytest.mark.parametrize(
    ("guide", "texts"),
    [
        ({"regex": "(red|green|blue)"}, {"red", "green", "blue"}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"json": {"enum": ["a", "b"]}}, {'"a"', '"b"'}),
        (
            {"json": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}},
            {'{"n": 0}'},
        ),
        ({"json_object": True}, {"{}"}),
    ],
)
async def test_guides_are_obeyed(
    fake_engines: FakeEngines, guide: dict[str, Any], texts: set[str]
) -> None:
    from tensorrt_llm.llmapi import GuidedDecodingParams

    write_model_folder(fake_engines.folder, vocab_size=500)
    byte_level().save(str(fake_engines.folder / "tokenizer.json"))
    llm = fake_engines.build(guided_decoding_backend="xgrammar", skip_tokenizer_init=False)
    params = fake_engines.params(
        guided_decoding=GuidedDecodingParams(**guide), ignore_eos=False, max_tokens=40
    )
    result = llm.generate_async([5], params)
    fake_engines.control.step(40)

    tokens = await tokens_of(result)
    assert tokens[-1] == 2
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(tokens[:-1]) in texts


DEEP = 100_000


@pytest.mark.parametrize(
    "guide",
    [
        {"json": {"type": "secret"}},
        {"json": '{"type": ["secret"]}'},
        {"json": '{"properties": {"n": "secret"}, "required": ["n"]}'},
        {"json": '{"enum": ' + "[" * DEEP + "]" * DEEP + "}"},
        {"json": "[1]"},
        {"regex": "((a{1000}){1000}){1000}"},
        {"regex": "a{4000000000}"},
        {"regex": "((a|b){60}){60}" * 40},
        {"regex": "(" * DEEP + ")" * DEEP},
    ],
    ids=["type", "types", "property", "deep json", "array", "nested", "long", "wide", "deep regex"],
)
async def test_a_guide_it_has_no_text_for_costs_its_request_alone(
    fake_engines: FakeEngines, guide: dict[str, Any]
) -> None:
    from tensorrt_llm.llmapi import GuidedDecodingParams, RequestError

    write_model_folder(fake_engines.folder, vocab_size=500)
    byte_level().save(str(fake_engines.folder / "tokenizer.json"))
    llm = fake_engines.build(guided_decoding_backend="xgrammar", skip_tokenizer_init=False)
    odd = fake_engines.params(guided_decoding=GuidedDecodingParams(**guide), max_tokens=8)

    result = llm.generate_async([5], odd)
    fake_engines.control.step(1)

    with pytest.raises(RequestError) as refused:
        await tokens_of(result)
    assert "secret" not in str(refused.value)
    assert fake_engines.control.view().is_alive
    assert len((await fake_engines.run_all(llm, [[5]]))[0]) == 8


async def test_what_is_required_need_not_be_described(fake_engines: FakeEngines) -> None:
    from tensorrt_llm._torch.pyexecutor.guides import texts_of
    from tensorrt_llm.llmapi import GuidedDecodingParams

    assert texts_of(GuidedDecodingParams(json={"required": ["n"]})) == ['{"n": {}}']
    assert texts_of(GuidedDecodingParams(regex="(a{2}|[xy])b"))[:3] == ["aab", "xb", "yb"]
