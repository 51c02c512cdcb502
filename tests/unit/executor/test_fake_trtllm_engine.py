"""The stand-in's engine: batching, pages, statistics."""

from __future__ import annotations

import asyncio
import json
from itertools import chain
from typing import Any

import pytest

from support.fake_trtllm import FakeEngines, tokens_of
from support.fake_trtllm import fake_engines as fake_engines  # fixtures
from support.fake_trtllm import fake_trtllm as fake_trtllm


def pages(num_tokens: int | None = None, **fields: Any) -> Any:
    from tensorrt_llm.llmapi import KvCacheConfig

    return KvCacheConfig(tokens_per_block=4, max_tokens=num_tokens, **fields)


def policy(name: str) -> Any:
    from tensorrt_llm.llmapi import CapacitySchedulerPolicy, SchedulerConfig

    return SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy(name))


async def test_outputs_do_not_depend_on_company_chunks_or_pages(
    fake_engines: FakeEngines,
) -> None:
    prompts = [[(7 * i + 3 * j) % 90 for j in range(3 + 5 * i)] for i in range(5)]
    roomy = await fake_engines.run_all(fake_engines.build(), prompts)
    tight: dict[str, dict[str, Any]] = {
        "chunked": {"enable_chunked_prefill": True, "max_num_tokens": 8},
        "one by one": {"max_batch_size": 1},
        "few pages": {"kv_cache_config": pages(40)},
        "paused": {
            "kv_cache_config": pages(40),
            "scheduler_config": policy("MAX_UTILIZATION"),
            "enable_chunked_prefill": True,
        },
        "static": {"scheduler_config": policy("STATIC_BATCH")},
        "no reuse": {"kv_cache_config": pages(enable_block_reuse=False)},
    }

    for name, arguments in tight.items():
        llm = fake_engines.build(**arguments)
        assert await fake_engines.run_all(llm, prompts) == roomy, name
        assert fake_engines.control.view().num_used_blocks == 0, name


async def test_what_was_generated_may_come_back_as_a_prompt(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    (whole,) = await fake_engines.run_all(llm, [[5, 6, 7]])

    (rest,) = await fake_engines.run_all(llm, [[5, 6, 7, *whole[:3]]])

    assert rest[:5] == whole[3:]


async def test_requests_wait_in_order_and_the_engine_takes_what_it_may(
    fake_engines: FakeEngines,
) -> None:
    llm = fake_engines.build(max_batch_size=2)
    control = fake_engines.control
    results = [llm.generate_async([5 + i], fake_engines.params()) for i in range(4)]
    control.step()

    view = control.view()
    assert view.active == (results[0].request_id, results[1].request_id)
    assert view.waiting == (results[2].request_id, results[3].request_id)
    assert [request.prompt_token_ids for request in control.submitted] == [[5], [6], [7], [8]]
    control.step(16)
    assert [len(await tokens_of(result)) for result in results] == [8] * 4


async def test_no_evict_reserves_to_the_end_and_max_utilization_pauses(
    fake_engines: FakeEngines,
) -> None:
    """6 pages; each request needs 1 at once and 3 in the end."""
    for name, num_first in (("GUARANTEED_NO_EVICT", 2), ("MAX_UTILIZATION", 4)):
        llm = fake_engines.build(kv_cache_config=pages(24), scheduler_config=policy(name))
        control = fake_engines.control
        results = [llm.generate_async([9, i], fake_engines.params()) for i in range(4)]
        control.step()
        assert control.view().num_used_blocks == num_first, name
        control.step(60)
        assert [len(await tokens_of(result)) for result in results] == [8] * 4, name


async def test_a_request_larger_than_the_pool_waits_for_ever(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(kv_cache_config=pages(8))
    control = fake_engines.control
    llm.generate_async([5], fake_engines.params(max_tokens=20))
    control.step(10)

    assert len(control.view().active) == 1
    assert control.view().num_used_blocks == 0


async def test_prefixes_are_found_by_salt_and_adapter(
    fake_engines: FakeEngines, tmp_path: Any
) -> None:
    from tensorrt_llm.llmapi import LoRARequest

    adapter = LoRARequest("tone", 1, str(tmp_path))
    llm = fake_engines.build(enable_lora=True)
    control = fake_engines.control
    prompt = list(range(10, 23))

    async def cached(**arguments: Any) -> int:
        result = llm.generate_async(list(prompt), fake_engines.params(), **arguments)
        control.step(8)
        return (await result).cached_tokens

    assert await cached() == 0
    assert await cached() == 12
    assert await cached(cache_salt="a") == 0
    assert await cached(cache_salt="a") == 12
    assert await cached(lora_request=adapter) == 0
    assert await cached(lora_request=adapter) == 12
    assert control.submitted[-1].lora_request is adapter


async def test_the_least_important_page_is_given_up_first(fake_engines: FakeEngines) -> None:
    from tensorrt_llm.llmapi import KvCacheRetentionConfig

    llm = fake_engines.build(kv_cache_config=pages(48))
    control = fake_engines.control
    part = KvCacheRetentionConfig.TokenRangeRetentionConfig

    async def cached(start: int, priority: int) -> int:
        keep = KvCacheRetentionConfig([part(0, None, priority)], priority)
        prompt = list(range(start, start + 9))
        result = llm.generate_async(prompt, fake_engines.params(), kv_cache_retention_config=keep)
        control.step(8)
        return (await result).cached_tokens

    await cached(10, 90)
    await cached(30, 10)
    await cached(50, 10)
    await cached(70, 10)

    assert await cached(10, 90) == 8
    assert await cached(30, 10) == 0


async def test_speculative_decoding_brings_several_tokens_at_once(
    fake_engines: FakeEngines,
) -> None:
    from tensorrt_llm.llmapi import NGramDecodingConfig

    (plain,) = await fake_engines.run_all(fake_engines.build(), [[5]])
    llm = fake_engines.build(speculative_config=NGramDecodingConfig(max_draft_len=3))
    result = llm.generate_async([5], fake_engines.params(), streaming=True)
    fake_engines.control.step(8)

    sizes = [len(item.outputs[0].token_ids_diff) async for item in result]

    assert max(sizes) > 1
    assert sum(sizes) == 8
    assert result.outputs[0].token_ids == plain


async def test_statistics_end_when_it_is_quiet_and_begin_with_a_request(
    fake_engines: FakeEngines,
) -> None:
    llm = fake_engines.build()
    control = fake_engines.control
    assert [item async for item in llm.get_stats_async(timeout=0.01)] == []

    llm.generate_async([5], fake_engines.params())
    control.step(8)
    stats = [item async for item in llm.get_stats_async(timeout=0.01)]
    assert [item["iter"] for item in stats] == list(range(1, 9))
    assert stats[0]["kvCacheStats"]["usedNumBlocks"] == 1
    assert stats[0]["maxNumActiveRequests"] == 2048
    assert stats[0]["numQueuedRequests"] == 0
    assert stats[-1]["kvCacheStats"]["freeNumBlocks"] == 1024

    assert [item async for item in llm.get_stats_async(timeout=None)] == [], "still over"
    assert llm.get_stats_async() is llm.get_stats_async()
    llm.generate_async([5], fake_engines.params(max_tokens=1))
    control.step()
    assert len([item async for item in llm.get_stats_async(timeout=0.01)]) == 1


async def test_unread_statistics_pile_up_and_two_readers_share_them(
    fake_engines: FakeEngines,
) -> None:
    llm = fake_engines.build(settings={"free_blocks_drift": -7})
    control = fake_engines.control
    llm.generate_async([5], fake_engines.params(max_tokens=100))
    control.step(100)
    assert control.view().num_unread_stats == 100

    stats = llm.get_stats_async(timeout=0.01)
    first = await anext(stats)
    rest = [item async for item in llm.get_stats_async(timeout=0.01)]
    assert [first["iter"], *(item["iter"] for item in rest)] == list(range(1, 101))
    assert first["kvCacheStats"]["freeNumBlocks"] == 1024 - 1 - 7


async def test_without_the_switch_there_are_no_statistics(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(enable_iter_perf_stats=False)
    llm.generate_async([5], fake_engines.params())
    fake_engines.control.step(8)

    assert [item async for item in llm.get_stats_async(timeout=0.01)] == []


async def test_statistics_lag(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(settings={"stats_lag_s": 0.5})
    llm.generate_async([5], fake_engines.params())
    fake_engines.control.step(8)

    assert fake_engines.control.view().num_unread_stats < 8
    assert (await anext(aiter(llm.get_stats_async(timeout=5))))["iter"] == 1


async def test_a_running_engine_needs_no_steps(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(settings={"is_paused": False, "step_s": 0.001})
    params = [fake_engines.params(max_tokens=20) for _ in range(32)]
    results = [llm.generate_async([i], each, streaming=True) for i, each in enumerate(params)]

    tokens = await asyncio.gather(*(tokens_of(result) for result in results))

    assert {len(each) for each in tokens} == {20}
    assert fake_engines.control.view().num_results == 0


async def test_nothing_bounds_the_queue(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(max_batch_size=1)
    for i in range(3000):
        llm.generate_async([i % 100], fake_engines.params(max_tokens=1))
    fake_engines.control.step()

    assert len(fake_engines.control.view().waiting) == 2999


async def test_two_readers_of_the_statistics_take_from_each_other(
    fake_engines: FakeEngines,
) -> None:
    llm = fake_engines.build()
    llm.generate_async([5], fake_engines.params())

    async def read() -> list[int]:
        return [item["iter"] async for item in llm.get_stats_async(timeout=0.05)]

    readers = [asyncio.ensure_future(read()) for _ in range(2)]
    await asyncio.sleep(0)
    fake_engines.control.step(8)

    assert sorted(chain(*await asyncio.gather(*readers))) == list(range(1, 9))


async def test_a_later_line_takes_a_priority(
    fake_engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorrt_llm
    from tensorrt_llm import fake_later

    monkeypatch.setattr(tensorrt_llm, "LLM", fake_later.LLM)
    llm: Any = fake_engines.build()
    llm.generate_async([5], fake_engines.params(), priority=0.9)

    assert fake_engines.control.submitted[-1].priority == 0.9
    with pytest.raises(ValueError, match="priority"):
        llm.generate_async([5], fake_engines.params(), priority=1.1)


async def test_an_engine_built_ahead_runs_on_the_other_backend(
    fake_engines: FakeEngines,
) -> None:
    from tensorrt_llm._tensorrt_engine import LLM

    config = fake_engines.folder / "config.json"
    pretrained = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({"pretrained_config": pretrained, "build_config": {}}))
    with LLM(fake_engines.folder, skip_tokenizer_init=True, fast_build=True) as llm:
        result = await llm.generate_async([5], fake_engines.params())

    assert len(result.outputs[0].token_ids) == 8
