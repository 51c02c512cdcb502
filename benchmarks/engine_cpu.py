"""Steps an engine on the CPU without a service, and creates Llamas with random weights for it.

Import this module before torch: like the service, it sets OpenMP's environment variables (number of
threads, how long they spin). They are read when torch is loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from penstock.executor.torch.thread_environment import plan_threads

# Before torch is loaded, as in the service.
_plan = plan_threads(
    num_cores=len(os.sched_getaffinity(0)), num_fronts=0, num_threads=None, environ=os.environ
)
os.environ.update({**_plan.environment, **os.environ})

import numpy as np

from usage import needing

with needing("torch"):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import RequestSpec, SamplingParams

VOCAB_SIZE = 8192
SHAPES = {"13.8M": (384, 6, 1024), "91M": (768, 12, 2048)}
"""Hidden size, number of layers (heads have 64 elements), size of the feed-forward network."""
Progress: TypeAlias = Iterator[tuple[int, int, bool]]
"""For each request that got tokens in a step: key, number of new tokens, whether it is finished."""


def build_model(folder: Path, shape: str = "13.8M") -> None:
    """Write a model of the given shape with random weights in bfloat16."""
    torch.manual_seed(0)
    hidden, num_layers, feed_forward = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


class EngineRun:
    """An engine that is stepped directly, with at most `budget` tokens in a step."""

    def __init__(self, executor: Executor, budget: int, temperature: float = 0.0) -> None:
        config = SchedulerConfig(max_num_batched_tokens=budget)
        self.engine = Engine(executor, config, time.monotonic)
        self._sampling = SamplingParams(temperature=temperature)
        self._key_of: dict[int, int] = {}

    def add(self, key: int, prompt: list[int], num_new: int) -> None:
        """Submit one request with a fixed output length. A key may be used for several requests."""
        own_key = len(self._key_of) + 1
        self._key_of[own_key] = key
        spec = RequestSpec(
            key=own_key,
            request_id=str(own_key),
            prompt_ids=np.array(prompt, dtype=np.int32),
            max_tokens=num_new,
            sampling=self._sampling,
            arrival_s=time.monotonic(),
        )
        self.engine.submit((spec,))

    def step(self) -> Progress:
        """Run one step; yield the progress of each request that got a token. The step runs when the
        first item is requested.
        """
        events = self.engine.step()
        ended = {end.key for end in events.ends}
        for key in events.keys.tolist():
            yield self._key_of[key], 1, key in ended
