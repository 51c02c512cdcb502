"""What callers of TensorRT-LLM's results must live with, shown on the stand-in."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from support.fake_trtllm import FakeEngines, tokens_of
from support.fake_trtllm import fake_engines as fake_engines  # fixtures
from support.fake_trtllm import fake_trtllm as fake_trtllm


async def turn_loop() -> None:
    """Let everything that is ready run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_same_object_comes_every_time_and_grows(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    result = llm.generate_async([5, 6], fake_engines.params(max_tokens=3), streaming=True)
    fake_engines.control.step(3)

    seen = []
    async for item in result:
        seen.append((item is result, len(item.outputs[0].token_ids)))

    assert seen == [(True, 1), (True, 2), (True, 3)]
    assert result.finished
    assert result.outputs[0].finish_reason == "length"
    assert result.outputs[0].stop_reason is None


async def test_nothing_is_coalesced_for_a_slow_reader(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    result = llm.generate_async([5], fake_engines.params(max_tokens=200), streaming=True)
    fake_engines.control.step(200)

    num_items = 0
    async for _ in result:
        num_items += 1

    assert num_items == 200


async def test_without_streaming_there_is_one_item(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    result = llm.generate_async([5], fake_engines.params())
    fake_engines.control.step(8)

    items = [len(item.outputs[0].token_ids) async for item in result]

    assert items == [8]
    assert await tokens_of(result) == result.outputs[0].token_ids


async def test_abort_of_a_waiting_request_never_ends_it(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(max_batch_size=1)
    control = fake_engines.control
    first = llm.generate_async([5], fake_engines.params(), streaming=True)
    waiting = llm.generate_async([6], fake_engines.params(), streaming=True)
    control.step()
    assert control.view().waiting == (waiting.request_id,)
    reader = asyncio.ensure_future(tokens_of(waiting))

    waiting.abort()
    control.step(20)
    await turn_loop()

    assert not reader.done()
    assert not waiting.finished
    assert waiting.aborted()
    assert control.view().waiting == ()
    assert control.view().num_results == 1, "the entry of the table stays for good"
    assert len(await tokens_of(first)) == 8
    reader.cancel()


async def test_abort_of_an_active_request_answers_an_iteration_later(
    fake_engines: FakeEngines,
) -> None:
    llm = fake_engines.build()
    control = fake_engines.control
    result = llm.generate_async([5], fake_engines.params(), streaming=True)
    control.step()
    await anext(result)
    assert control.view().num_used_blocks == 1

    result.abort()
    result.abort()
    assert not result.finished
    control.step()
    last = await anext(result)

    assert last.finished
    assert last.outputs[0].finish_reason == "cancelled"
    assert control.view().num_used_blocks == 0
    assert control.view().num_results == 0


async def test_a_request_error_is_the_last_word_and_leaves_finished_false(
    fake_engines: FakeEngines,
) -> None:
    from tensorrt_llm.llmapi import RequestError

    llm = fake_engines.build(settings={"fail_at_output": 2, "fail_message": "sampling failed"})
    control = fake_engines.control
    result = llm.generate_async([5], fake_engines.params(), streaming=True)
    control.step(3)

    await anext(result)
    await anext(result)
    with pytest.raises(RequestError, match="sampling failed"):
        await anext(result)
    again = asyncio.ensure_future(anext(result))
    control.step(5)
    await turn_loop()

    assert not result.finished
    assert not again.done()
    assert control.view().num_used_blocks == 0
    assert llm._check_health()
    again.cancel()


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([5, 128], {}, "Token ID out of range"),
        ([5] * 257, {}, "exceeds max_seq_len"),
        ([5] * 256, {}, "must be positive"),
        ([5], {"max_tokens": 0}, "must be positive"),
        ([5], {"stop": "x"}, "not processed by tokenizer"),
        ([5], {"embedding_bias": [0.0] * 3}, "embedding_bias"),
    ],
)
async def test_what_the_worker_refuses_comes_out_of_iteration(
    fake_engines: FakeEngines, prompt: list[int], changes: dict[str, Any], message: str
) -> None:
    from tensorrt_llm.llmapi import RequestError

    llm = fake_engines.build()
    result = llm.generate_async(prompt, fake_engines.params(**changes), streaming=True)
    fake_engines.control.step()

    with pytest.raises(RequestError, match=message):
        await anext(result)


async def test_guided_requests_need_a_backend(fake_engines: FakeEngines) -> None:
    from tensorrt_llm.llmapi import GuidedDecodingParams, RequestError

    llm = fake_engines.build()
    params = fake_engines.params(guided_decoding=GuidedDecodingParams(regex="a|b"))
    result = llm.generate_async([5], params)
    fake_engines.control.step()

    with pytest.raises(RequestError, match="guided_decoding_backend"):
        await anext(result)
    with pytest.raises(ValueError, match="Only one guide"):
        fake_engines.params(guided_decoding=GuidedDecodingParams(regex="a", grammar="b"))


async def test_what_is_refused_at_the_call(fake_engines: FakeEngines) -> None:
    from tensorrt_llm.llmapi import LoRARequest, RequestError

    llm = fake_engines.build(max_num_tokens=16)
    with pytest.raises(RequestError, match="max_num_tokens"):
        llm.generate_async([5] * 17, fake_engines.params())
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate_async([5], {"max_tokens": 3})  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match="inputs"):
        llm.generate_async((5,), fake_engines.params())  # type: ignore[arg-type]  # what is tested
    with pytest.raises(IndexError):
        llm.generate_async([], fake_engines.params())
    with pytest.raises(ValueError, match="end_id"):
        llm.generate_async([5], fake_engines.params(end_id=None))
    with pytest.raises(ValueError, match="does not exist"):
        LoRARequest("a", 1, "/nowhere")
    assert fake_engines.control.view().num_results == 0


async def test_sampling_params_are_changed_and_max_tokens_is_clipped_silently(
    fake_engines: FakeEngines,
) -> None:
    from tensorrt_llm import SamplingParams

    llm = fake_engines.build(return_perf_metrics=True)
    params = SamplingParams(end_id=2, max_tokens=1000, ignore_eos=True)
    result = llm.generate_async([5] * 250, params)
    fake_engines.control.step(6)

    assert len(await tokens_of(result)) == 6
    assert params.return_perf_metrics
    assert params._stream_interval == 1
    assert result.outputs[0].request_perf_metrics is not None
    assert SamplingParams(end_id=2).max_tokens == 32


def test_without_a_loop_only_blocking_calls_work(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    result = llm.generate_async([5], fake_engines.params(), streaming=True)
    fake_engines.control.step(8)

    with pytest.raises(AssertionError, match="event loop was not present"):
        asyncio.run(result.aresult())
    assert len(result.result().outputs[0].token_ids) == 8


async def test_one_loop_is_woken_for_a_whole_batch(fake_engines: FakeEngines) -> None:
    """The other loop has its item and is not told."""
    llm = fake_engines.build()
    control = fake_engines.control
    here = llm.generate_async([5], fake_engines.params(max_tokens=1))
    other = asyncio.new_event_loop()
    waits, done = threading.Event(), threading.Event()

    async def there() -> None:
        result = llm.generate_async([6], fake_engines.params(max_tokens=1))
        other.call_soon(waits.set)
        await anext(result)
        done.set()

    thread = threading.Thread(target=other.run_until_complete, args=(there(),))
    thread.start()
    assert await asyncio.to_thread(waits.wait, 10)
    control.step()
    await anext(here)
    await turn_loop()

    assert not done.is_set()
    other.call_soon_threadsafe(lambda: None)
    await asyncio.to_thread(thread.join, 10)
    assert done.is_set()
    other.close()


async def test_a_stop_token_is_taken_off_the_last_item(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    control = fake_engines.control
    free = llm.generate_async([5], fake_engines.params())
    control.step(8)
    tokens = await tokens_of(free)
    stop = tokens[3]

    cut = llm.generate_async([5], fake_engines.params(stop_token_ids=[stop]))
    whole = llm.generate_async(
        [5], fake_engines.params(stop_token_ids=[stop], include_stop_str_in_output=True)
    )
    ended = llm.generate_async([5], fake_engines.params(end_id=stop, ignore_eos=False))
    control.step(8)

    first = tokens.index(stop)
    assert await tokens_of(cut) == tokens[:first]
    assert await tokens_of(whole) == tokens[: first + 1]
    assert await tokens_of(ended) == tokens[: first + 1]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)


async def test_the_end_token_may_be_left_out(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    (tokens,) = await fake_engines.run_all(llm, [[5]])
    end = tokens[3]

    llm = fake_engines.build(settings={"is_end_token_kept": False})
    result = llm.generate_async([5], fake_engines.params(end_id=end, ignore_eos=False))
    fake_engines.control.step(8)

    assert await tokens_of(result) == tokens[: tokens.index(end)]
    assert result.outputs[0].finish_reason == "stop"


@pytest.fixture
def letters(fake_engines: FakeEngines) -> FakeEngines:
    """A tokenizer in the folder: one token, one character, from token 3 on."""
    vocab = {chr(200 + i): i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=chr(200)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(fake_engines.folder / "tokenizer.json"))
    return fake_engines


async def test_token_ids_shrink_at_a_stop_string(letters: FakeEngines) -> None:
    """Of three tokens of a stop string two were given out before the third came."""
    llm = letters.build(skip_tokenizer_init=False)
    free = llm.generate_async([5], letters.params())
    letters.control.step(8)
    tokens = await tokens_of(free)
    assert llm.tokenizer is not None
    stop = "".join(chr(200 + token) for token in tokens[2:5])
    params = letters.params(stop=stop, end_id=None, ignore_eos=True)

    result = llm.generate_async([5], params, streaming=True)
    letters.control.step(8)
    lengths = [len(item.outputs[0].token_ids) async for item in result]

    assert params.end_id == 2
    assert lengths == [1, 2, 3, 4, 2]
    assert result.outputs[0].stop_reason == stop
    assert result.outputs[0].token_ids_diff == []


async def test_text_shrinks_and_the_engine_goes_on_after_a_stop_in_the_text(
    letters: FakeEngines,
) -> None:
    llm = letters.build(skip_tokenizer_init=False)
    free = llm.generate_async([5], letters.params(detokenize=True))
    letters.control.step(8)
    await free.aresult()
    stop = free.outputs[0].text[2:4]
    assert stop
    params = letters.params(detokenize=True, max_tokens=50)
    result = llm.generate_async([5], params, streaming=True)
    letters.control.step(1)
    # Known to the reader alone, as when the text has the stop and the tokens do not.
    params.stop = stop
    letters.control.step(7)

    texts = [item.outputs[0].text async for item in result]

    assert texts[-1] == free.outputs[0].text[: free.outputs[0].text.index(stop)]
    assert len(texts[-1]) < len(texts[-2])
    assert result.finished
    assert letters.control.view().active == (result.request_id,)
