"""Runs one architecture through the real engine, and compares it with the model's own eager
forward pass.

The result for a model type is exact, wrong, rejected or not buildable. Requests are chunked, share
prefixes and are preempted; every log probability of prompts and outputs is compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig

from models.tiny_configs import WINDOW, tiny_config, tiny_model
from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.create import create_torch_executor
from penstock.executor.torch.errors import ModelLoadError, UnsupportedModel
from penstock.scheduler.events import Admitted, Failed, Preempted, StepEvents
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import RequestSpec, SamplingParams
from support.core import ends, make_spec
from support.torch_differential import run_mixed
from support.torch_models import NaiveModel

Outcome = Literal["exact", "wrong", "rejected", "not buildable"]

TOLERANCE = 0.01
"""Tolerance of a float32 log probability; a wrong position or a lost key differs by far more."""
_BLOCK_SIZE = 8
_BUDGET = 24
_NUM_SLOTS = 5
_NUM_BLOCKS = 20
_LENGTHS = (1, 130, 2, 7, 8, 9, 33, 60, 25, 90, 40, 17)
_SHARED = 24
_MAX_TOKENS = 9
_SAMPLING = SamplingParams(temperature=0.0, num_logprobs=0, num_prompt_logprobs=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeResult:
    """The result for one model type.

    `detail`: why it is not exact. `largest_error`: largest absolute error of a log probability.
    `is_fused`: it ran in the fused step instead of the modules of transformers.
    """

    model_type: str
    outcome: Outcome
    detail: str = ""
    largest_error: float = 0.0
    is_fused: bool = False


def check_architecture(
    model_type: str, *, device: str = "cpu", config: PretrainedConfig | None = None
) -> TypeResult:
    """Build a tiny model of type `model_type`, run it through the engine on `device`, and compare
    it with the model's own eager forward pass; return the result. `config`: the model's
    configuration; None: a small one of the type.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-architecture-") as name:
        folder = Path(name)
        try:
            tiny: Any = tiny_model(config or tiny_config(model_type))
            tiny.save_pretrained(folder)
            naive = NaiveModel(folder, device)
            is_finite = bool(np.isfinite(naive.logits(range(3, 60))).all())
        except Exception as error:
            return TypeResult(
                model_type=model_type, outcome="not buildable", detail=_described(error)
            )
        if not is_finite:
            detail = "its own logits are not finite"
            return TypeResult(model_type=model_type, outcome="not buildable", detail=detail)
        try:
            executor = _build(folder, device, _NUM_BLOCKS)
            if executor.info.max_seq_len < max(_LENGTHS):
                # Few enough that requests of that length are still preempted.
                num_blocks = executor.info.max_seq_len // _BLOCK_SIZE + 2
                executor = _build(folder, device, num_blocks)
        except (UnsupportedModel, ModelLoadError) as error:
            detail = str(error).replace(f"{folder}: ", "")
            return TypeResult(model_type=model_type, outcome="rejected", detail=detail)
        return _compared(model_type, executor, naive)


def _build(folder: Path, device: str, num_blocks: int) -> Executor:
    """Return the executor that would serve the model in `folder`."""
    return create_torch_executor(
        ExecutorConfig(
            model_path=folder,
            device=device,
            block_size=_BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=_NUM_SLOTS,
        )
    )


def _described(error: Exception) -> str:
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line}"[:160]


def _requests(vocab_size: int, max_seq_len: int) -> list[RequestSpec]:
    random = np.random.default_rng(1)
    shared, *own = (
        random.integers(3, min(vocab_size, 250), length).tolist() for length in (_SHARED, *_LENGTHS)
    )
    prompts = [
        ((shared + ids)[: len(ids)] if len(ids) > _SHARED else ids)[: max_seq_len - _MAX_TOKENS]
        for ids in own
    ]

    def spec(key: int, prompt: list[int], sampling: SamplingParams) -> RequestSpec:
        return make_spec(
            key, prompt, max_tokens=_MAX_TOKENS, block_size=_BLOCK_SIZE, sampling=sampling
        )

    first = [spec(key, prompt, _SAMPLING) for key, prompt in enumerate(prompts, start=1)]
    # The first prompts once more: prefix hits of what is cached by then.
    of_output = replace(_SAMPLING, num_prompt_logprobs=-1)
    return first + [spec(20 + key, prompts[key - 1], of_output) for key in range(2, 13, 3)]


def _compared(model_type: str, executor: Executor, naive: NaiveModel) -> TypeResult:
    specs = _requests(executor.info.vocab_size, executor.info.max_seq_len)
    events = run_mixed(executor, specs, budget=_BUDGET)
    executor.close()
    failed = [end.detail for end in ends(events).values() if isinstance(end, Failed)]
    if failed:
        return TypeResult(model_type=model_type, outcome="wrong", detail=f"failed: {failed[0]}")
    _check_coverage(events)
    outputs, errors = _logprobs(events), []
    for spec in specs:
        prompt = spec.prompt_ids.tolist()
        tokens, chosen, of_prompt = outputs[spec.key]
        expected = _log_softmax(naive.logits([*prompt, *tokens][:-1]))
        positions = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        errors += [
            abs(expected[position, token] - value)
            for position, token, value in zip(positions, tokens, chosen, strict=True)
        ]
        errors += [
            abs(expected[position - 1, prompt[position]] - value)
            for position, value in of_prompt.items()
        ]
    largest = float(np.max(errors))
    num_wrong = sum(not error <= TOLERANCE for error in errors)
    return TypeResult(
        model_type=model_type,
        outcome="wrong" if num_wrong else "exact",
        detail=f"{num_wrong} of {len(errors)} log probabilities" if num_wrong else _limit(executor),
        largest_error=largest,
        is_fused="fused path" in executor.info.resources,
    )


def _limit(executor: Executor) -> str:
    length = executor.info.max_seq_len
    return f"up to {length} tokens, its window" if length == WINDOW else ""


def _check_coverage(events: Sequence[StepEvents]) -> None:
    changes = [change for step in events for change in step.changes]
    if not any(isinstance(change, Preempted) for change in changes):
        raise AssertionError("no request was preempted")
    if not any(isinstance(change, Admitted) and change.num_cached_tokens for change in changes):
        raise AssertionError("no request had a prefix hit")


def _logprobs(
    events: Sequence[StepEvents],
) -> dict[int, tuple[list[int], list[float], dict[int, float]]]:
    """Return, by request key, (output tokens, their log probabilities, prompt log probabilities by
    token position).
    """
    found: dict[int, tuple[list[int], list[float], dict[int, float]]] = {}
    for step in events:
        for key, first, part in step.prompt_logprobs:
            of_prompt = found.setdefault(key, ([], [], {}))[2]
            of_prompt.update(enumerate(part.chosen.tolist(), start=first))
        if step.logprobs is None:
            continue
        rows = zip(
            step.keys.tolist(), step.tokens.tolist(), step.logprobs.chosen.tolist(), strict=True
        )
        for key, token, value in rows:
            tokens, chosen, _ = found.setdefault(key, ([], [], {}))
            tokens.append(token)
            chosen.append(value)
    return found


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    return found
