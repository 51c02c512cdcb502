"""If the engine of a CPU model dies, the next engine continues with exactly the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.executor.models import resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import SamplingParams
from penstock.server.front.generation import (
    GenerationSpec,
    Output,
    Sampling,
    Stopping,
    TextInput,
)
from penstock.server.text.model_text import ModelText
from property.restarting_engines import Death, RestartingService, play

DEATHS = [Death(3, 1), Death(0, 0), Death(6, 2)]


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    text = ModelText.load(resolve_model("demo"), name="demo")
    yield text
    text.close()


def make_executor() -> Executor:
    return create_executor(
        ExecutorConfig(
            kind=ExecutorKind.TORCH,
            model_path=resolve_model("demo"),
            device="cpu",
            dtype="float32",
            num_blocks=128,
            max_seq_len=256,
            max_num_seqs=8,
            num_threads=1,
        )
    )


def generation(params: SamplingParams, num_outputs: int = 1, min_tokens: int = 0) -> GenerationSpec:
    return GenerationSpec(
        prompt=TextInput(text="The gate opens and the water"),
        prompt_path="text_prompt.text",
        sampling=Sampling(params=params, seed=11, num_outputs=num_outputs),
        stopping=Stopping(max_tokens=16, min_tokens=min_tokens, ignore_eos=min_tokens == 0),
        output=Output(num_logprobs=params.num_logprobs, return_token_ids=True),
    )


ASKED = [
    generation(SamplingParams(temperature=0.0)),
    generation(SamplingParams(temperature=1.0)),
    generation(SamplingParams(temperature=1.3, top_k=40, top_p=0.9), num_outputs=2),
    generation(SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=1.0)),
    generation(SamplingParams(temperature=0.8, repetition_penalty=1.4), min_tokens=12),
    generation(SamplingParams(temperature=0.0, logit_bias=((300, 4.0),), min_p=0.1)),
]


async def test_greedy_and_seeded_outputs_are_unchanged_by_deaths(text: ModelText) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=32)
    undisturbed = await play(RestartingService(text, make_executor, scheduler), ASKED, [])
    disturbed = await play(RestartingService(text, make_executor, scheduler), ASKED, DEATHS)
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert not one.rejected
        assert other.content() == one.content()
    # The requests have different outputs, so none can be mistaken for another.
    assert len({str(one.content()) for one in undisturbed}) == len(ASKED)
