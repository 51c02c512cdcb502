"""Checks every causal language model of transformers, and writes docs/architectures.md.

`make architectures` checks all types (`check`) and writes the page; on a CUDA device it writes only
the page's section on CUDA. `--type NAME` checks one type and writes nothing. Each model runs in a
separate process with a time limit and, on a CPU, a memory limit: a model that hangs or dies has a
result like any other. The exit code is 1 if a type would be served wrongly.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import re
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.check import TOLERANCE, TypeResult, check_architecture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
_MEMORY_BYTES = 12 << 30
_TIME_LIMIT_S = 120.0


def check(model_type: str, device: str) -> TypeResult:
    """Return the result of a type that is checked in a separate process; "not buildable" if that
    process dies or hangs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["models.check"])
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=work, args=(model_type, device, sender))
    worker.start()
    sender.close()
    try:
        if receiver.poll(_TIME_LIMIT_S):
            result: TypeResult = receiver.recv()
            return result
        why = f"not done in {_TIME_LIMIT_S:.0f} s"
    except EOFError:
        why = "the process died"
    finally:
        worker.kill()
        worker.join()
    return TypeResult(model_type=model_type, outcome="not buildable", detail=why)


def work(model_type: str, device: str, sender: Connection) -> None:
    """Check the type, on a CPU within a memory limit, and send the result through `sender`."""
    logging.disable()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        sender.send(check_architecture(model_type, device=device))
    except Exception as error:
        # Neither rejected nor exact: the load or a step failed unexpectedly.
        detail = f"{type(error).__name__}: {error}"[:160]
        sender.send(TypeResult(model_type=model_type, outcome="wrong", detail=detail))


_PAGE = """\
# Architectures

<!-- Written by tests/models/sweep.py: `make architectures`. -->

What the torch executor does with every causal language model of transformers {transformers}, with
torch {torch}, device {device}.

Each type is built tiny with random weights in float32 and runs through the real engine: chunked
prompts, prefix hits, preemption, decodes and chunks in one step. *Exact*: no log probability of
prompt or output differs by more than {tolerance} from the model's own eager forward of the sequence
(at most {largest:.0e}). *Wrong* would be an error of the executor. Models are rejected at load. The
load probe decides, not this page: a checkpoint may differ from its type's default configuration.

| | model types |
|---|---|
{counts}

## Exact

{exact}.

{limited}## Rejected

{rejected}

## Not buildable

Transformers itself could not make or run a tiny model.

{not_buildable}
{wrong}"""


_CUDA_HEADING = "## On CUDA"
_CUDA_SECTION = """\
{heading}

The same sweep with `--device cuda` on {name}: transformers {transformers}, torch {torch}. {counts}
The largest difference found is {largest:.0e}.

By the fused step: {fused}.

By the modules of transformers: {eager}.
{wrong}"""


def page_of(results: Sequence[TypeResult], device: str) -> str:
    found: dict[str, list[TypeResult]] = {
        outcome: [result for result in results if result.outcome == outcome]
        for outcome in ("exact", "rejected", "not buildable", "wrong")
    }
    limited = [f"`{one.model_type}` ({one.detail})" for one in found["exact"] if one.detail]
    return _PAGE.format(
        **_facts_of(found["exact"]),
        device=device,
        tolerance=TOLERANCE,
        counts="\n".join(f"| {outcome} | {len(some)} |" for outcome, some in found.items()),
        exact=_names(found["exact"]),
        limited=f"Only up to a length: {', '.join(limited)}.\n\n" if limited else "",
        rejected=_table(found["rejected"]),
        not_buildable=_table(found["not buildable"]),
        wrong=f"\n## Wrong\n\n{_table(found['wrong'])}\n" if found["wrong"] else "",
    )


def cuda_section(results: Sequence[TypeResult], device: str) -> str:
    exact = [one for one in results if one.outcome == "exact"]
    wrong = [one for one in results if one.outcome == "wrong"]
    counts = Counter(one.outcome for one in results)
    return _CUDA_SECTION.format(
        **_facts_of(exact),
        heading=_CUDA_HEADING,
        name=torch.cuda.get_device_name(device) if torch.cuda.is_available() else device,
        counts=", ".join(f"{count} {name}" for name, count in counts.items()) + ".",
        fused=_names([one for one in exact if one.is_fused]),
        eager=_names([one for one in exact if not one.is_fused]),
        wrong=f"\n### Wrong on CUDA\n\n{_table(wrong)}\n" if wrong else "",
    )


def _facts_of(exact: Sequence[TypeResult]) -> dict[str, object]:
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "largest": max((one.largest_error for one in exact), default=0.0),
    }


def _names(results: Sequence[TypeResult]) -> str:
    return ", ".join(f"`{one.model_type}`" for one in results) or "none"


def _table(results: Sequence[TypeResult]) -> str:
    """Return a Markdown table. Each row has a reason, and the model types with that reason."""
    types: dict[str, list[str]] = {}
    for one in results:
        # The detail starts with the name of the model or of its text part.
        reason = re.sub(rf"^{re.escape(one.model_type)}(_text)?:? ", "", one.detail)
        types.setdefault(reason.replace("|", r"\|"), []).append(f"`{one.model_type}`")
    rows = [f"| {reason} | {', '.join(names)} |" for reason, names in types.items()]
    return "\n".join(["| reason | model types |", "|---|---|", *rows])


def write_page(results: Sequence[TypeResult], device: str) -> None:
    """Write the page and keep its section on CUDA; on a CUDA device, write only that section."""
    page, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n{_CUDA_HEADING}")
    if device == "cpu":
        page = page_of(results, device)
        section = section and f"\n{_CUDA_HEADING}{section}"
    else:
        section = f"\n{cuda_section(results, device)}"
    PAGE.write_text(page + section, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every architecture of transformers.")
    parser.add_argument("--type", action="append", metavar="NAME", help="this one alone, repeat")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="workers at a time")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of each worker
    model_types = options.type or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    results: list[TypeResult] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(partial(check, device=options.device), model_types):
            results.append(result)
            error = f"{result.largest_error:.1e}" if result.outcome in ("exact", "wrong") else ""
            progress = f"{len(results)}/{len(model_types)}"
            reported = f"{progress} {result.model_type}: {result.outcome} {error} {result.detail}"
            print(reported, flush=True)
    if not options.type:
        write_page(results, options.device)
    return int(any(result.outcome == "wrong" for result in results))


if __name__ == "__main__":
    sys.exit(main())
