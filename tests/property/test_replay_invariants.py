"""Clients receive the same content from engines that die at any time as from one that does not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.create import create_executor
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import SamplingParams
from penstock.server.front.config import FrontConfig
from penstock.server.front.generation import (
    GenerationSpec,
    Output,
    Sampling,
    Stopping,
    TokenInput,
)
from penstock.server.text.model_text import ModelText
from property.restarting_engines import Death, Delivered, RestartingService, play

MAX_SEQ_LEN = 64


@dataclass(frozen=True)
class Harness:
    """The settings that all engines of one run have."""

    pipeline_depth: int = 1
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    policy: AdmissionPolicy = AdmissionPolicy.MAX_UTILIZATION
    is_prefix_caching: bool = True


harnesses = st.builds(
    Harness,
    pipeline_depth=st.sampled_from((1, 2)),
    # With few blocks requests are preempted too.
    num_blocks=st.sampled_from((16, 24, 64)),
    block_size=st.sampled_from((2, 4)),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 40),
    policy=st.sampled_from(list(AdmissionPolicy)),
    is_prefix_caching=st.booleans(),
)
prompts = st.one_of(
    st.lists(st.integers(3, 400), min_size=1, max_size=20),
    st.integers(1, 20).map(lambda num_tokens: list(range(10, 10 + num_tokens))),
).map(lambda ids: TokenInput(ids=tuple(ids)))
samplings = st.builds(
    Sampling,
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from((0.0, 1.0)),
        num_logprobs=st.sampled_from((-1, -1, 0, 2)),
    ),
    seed=st.integers(0, 2**64 - 1),
    num_outputs=st.sampled_from((1, 1, 1, 2, 3)),
)
stoppings = st.builds(
    Stopping,
    max_tokens=st.integers(4, 12),
    min_tokens=st.integers(0, 4),
    stop_strings=st.sampled_from(((), (), ("e",), ("th", " a"))),
    stop_token_ids=st.sampled_from(((), (97,))),
    ignore_eos=st.booleans(),
    include_stop_string=st.booleans(),
)


def generation_of(
    prompt: TokenInput,
    sampling: Sampling,
    stopping: Stopping,
    has_echo: bool,
    has_prompt_logprobs: bool,
) -> GenerationSpec:
    num_prompt_logprobs = 1 if has_prompt_logprobs else -1
    params = replace(sampling.params, num_prompt_logprobs=num_prompt_logprobs)
    return GenerationSpec(
        prompt=prompt,
        prompt_path="token_ids",
        sampling=structs.replace(sampling, params=params),
        stopping=stopping,
        output=Output(
            num_logprobs=params.num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            return_token_ids=has_echo,
            echo=has_echo,
        ),
    )


generations = st.builds(
    generation_of,
    prompts,
    samplings,
    stoppings,
    st.booleans(),
    st.sampled_from((False, False, True)),
)
deaths = st.lists(st.builds(Death, st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=6)


def run(
    text: ModelText,
    harness: Harness,
    asked: list[GenerationSpec],
    dying: list[Death],
    turns_between: int,
    max_replays: int = 1000,
) -> list[Delivered]:
    def make_executor() -> Executor:
        return create_executor(
            ExecutorConfig(
                kind=ExecutorKind.SIMULATED,
                num_blocks=harness.num_blocks,
                block_size=harness.block_size,
                max_seq_len=MAX_SEQ_LEN,
                max_num_seqs=harness.max_num_seqs,
                pipeline_depth=harness.pipeline_depth,
                simulated=SimulatedConfig(
                    vocab_size=text.files.vocab_size, max_output_tokens=9, is_strict=True
                ),
            )
        )

    scheduler = SchedulerConfig(
        max_num_batched_tokens=harness.max_num_batched_tokens,
        admission_policy=harness.policy,
    )
    config = FrontConfig(
        max_replays=max_replays,
        acceptance_delay_s=60.0,
        is_prefix_caching=harness.is_prefix_caching,
    )
    service = RestartingService(text, make_executor, scheduler, config)
    return asyncio.run(play(service, asked, dying, turns_between=turns_between))


# Each runs whole services to their end.
fewer = settings(max_examples=settings().max_examples // 2)


@given(harnesses, st.lists(generations, min_size=1, max_size=6), deaths, st.integers(0, 4))
@fewer
@example(
    Harness(pipeline_depth=2),
    [
        generation_of(
            TokenInput(ids=tuple(range(10, 30))),
            Sampling(seed=1, num_outputs=3),
            Stopping(max_tokens=12, min_tokens=3),
            True,
            True,
        )
    ],
    [Death(number, number % 3) for number in range(6)],
    0,
)
def test_deaths_change_nothing_that_clients_receive(
    text: ModelText,
    harness: Harness,
    asked: list[GenerationSpec],
    dying: list[Death],
    turns_between: int,
) -> None:
    undisturbed = run(text, harness, asked, [], turns_between)
    disturbed = run(text, harness, asked, dying, turns_between)
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert not one.rejected
        assert other.content() == one.content()


@given(st.lists(generations, min_size=1, max_size=4), st.integers(0, 2), deaths)
@fewer
def test_beyond_the_budget_streams_end_after_a_prefix(
    text: ModelText, asked: list[GenerationSpec], max_replays: int, dying: list[Death]
) -> None:
    undisturbed = run(text, Harness(), asked, [], 0)
    disturbed = run(text, Harness(), asked, dying, 0, max_replays)
    for one, other in zip(undisturbed, disturbed, strict=True):
        if not other.rejected:
            assert other.content() == one.content()
            continue
        assert other.rejected == "ENGINE_DOWN"
        for index, text_delivered in other.texts().items():
            assert one.texts().get(index, "").startswith(text_delivered)
