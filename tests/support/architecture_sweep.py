"""Checks every causal language model of transformers, and writes docs/architectures.md.

`python tests/support/architecture_sweep.py` checks all types (`architecture_check`) and writes the
page, on a CUDA device its section on CUDA; `--type NAME` checks one and writes none. Models run in
worker processes with a limit of memory and time: one that hangs or dies is a result like any other.
Exit code 1 when a type would be served wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.architecture_check import Verdict

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "architectures.md"
_MEMORY_BYTES = 12 << 30
_TIME_LIMIT_S = 120.0


def known_types() -> list[str]:
    """Return the model types that AutoModelForCausalLM accepts, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def work(model_types: Sequence[str], device: str) -> None:
    """Check the types one after another in a worker; print a line of JSON for each."""
    from transformers.utils import logging

    from support.architecture_check import Verdict, check_architecture

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for model_type in model_types:
        try:
            verdict = check_architecture(model_type, device=device)
        except Exception as error:
            # Neither refused nor exact: the load or a step failed unexpectedly.
            detail = f"{type(error).__name__}: {error}"[:160]
            verdict = Verdict(model_type=model_type, outcome="wrong", detail=detail)
        print(json.dumps(asdict(verdict)), flush=True)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker: one thread, and the import path of this process."""
    roots = [str(TESTS), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}


def sweep(model_types: Sequence[str], device: str) -> Iterator[Verdict]:
    """Return the verdicts in order; replace a worker that hangs or dies."""
    from support.architecture_check import Verdict

    left = list(model_types)
    while left:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", "--device", device]
        command += [f"--type={model_type}" for model_type in left]
        environment = worker_environment(os.environ)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        ) as worker:
            assert worker.stdout is not None
            while left:
                is_ready, _, _ = select.select([worker.stdout], [], [], _TIME_LIMIT_S)
                line = worker.stdout.readline() if is_ready else b""
                if not line:
                    worker.kill()
                    why = "the process died" if is_ready else f"not done in {_TIME_LIMIT_S:.0f} s"
                    yield Verdict(model_type=left.pop(0), outcome="not buildable", detail=why)
                    break
                left.pop(0)
                yield Verdict(**json.loads(line))


_PAGE = """\
# Architectures

<!-- Written by tests/support/architecture_sweep.py: `make architectures`. -->

What the torch executor does with every causal language model of the installed transformers:
version {transformers}, torch {torch}, device {device}. `make architectures` writes this page.

Each type is built tiny with random weights in float32 and runs through the real engine: chunked
prompts, prefix hits, preemption, decodes and chunks in one step. Every log probability of prompts
and outputs is compared with the model's own eager forward of the one sequence. *Exact* means that
none differs by more than {tolerance} (the largest difference found is {largest:.0e}); a type that
would be served wrongly is an error of the executor. A refusal happens at load, before the first
request. A checkpoint may switch on what the default configuration of its type has not, or the other
way round; the load probe decides, not this page.

| | model types |
|---|---|
{counts}

## Exact

{exact}.

{limited}## Refused

{refused}

## Not buildable

No tiny model could be made or run by transformers itself: nothing is known about these.

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


def cuda_section(verdicts: Sequence[Verdict], device: str) -> str:
    import torch
    import transformers

    exact = [one for one in verdicts if one.outcome == "exact"]
    wrong = [one for one in verdicts if one.outcome == "wrong"]
    outcomes = ("exact", "refused", "not buildable", "wrong")
    counts = {name: sum(one.outcome == name for one in verdicts) for name in outcomes}

    def names(is_fused: bool) -> str:
        found = [f"`{one.model_type}`" for one in exact if one.is_fused is is_fused]
        return ", ".join(found) or "none"

    return _CUDA_SECTION.format(
        heading=_CUDA_HEADING,
        name=torch.cuda.get_device_name(device) if torch.cuda.is_available() else device,
        transformers=transformers.__version__,
        torch=torch.__version__,
        counts=", ".join(f"{count} {name}" for name, count in counts.items()) + ".",
        largest=max((one.largest_error for one in exact), default=0.0),
        fused=names(True),
        eager=names(False),
        wrong=f"\n### Wrong on CUDA\n\n{_table(wrong)}\n" if wrong else "",
    )


def write_page(verdicts: Sequence[Verdict], device: str) -> None:
    """Write the page or only its section on CUDA; keep the other part."""
    page, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n{_CUDA_HEADING}")
    if device == "cpu":
        page = page_of(verdicts, device)
        section = section and f"\n{_CUDA_HEADING}{section}"
    else:
        section = f"\n{cuda_section(verdicts, device)}"
    PAGE.write_text(page + section, encoding="utf-8")


def page_of(verdicts: Sequence[Verdict], device: str) -> str:
    import torch
    import transformers

    from support.architecture_check import TOLERANCE

    found: dict[str, list[Verdict]] = {
        outcome: [verdict for verdict in verdicts if verdict.outcome == outcome]
        for outcome in ("exact", "refused", "not buildable", "wrong")
    }
    limited = [f"`{one.model_type}` ({one.detail})" for one in found["exact"] if one.detail]
    return _PAGE.format(
        transformers=transformers.__version__,
        torch=torch.__version__,
        device=device,
        tolerance=TOLERANCE,
        largest=max((one.largest_error for one in found["exact"]), default=0.0),
        counts="\n".join(f"| {outcome} | {len(some)} |" for outcome, some in found.items()),
        exact=", ".join(f"`{one.model_type}`" for one in found["exact"]),
        limited=f"Only up to a length: {', '.join(limited)}.\n\n" if limited else "",
        refused=_table(found["refused"]),
        not_buildable=_table(found["not buildable"]),
        wrong=f"\n## Wrong\n\n{_table(found['wrong'])}\n" if found["wrong"] else "",
    )


def _table(verdicts: Sequence[Verdict]) -> str:
    """Return model types and details as a Markdown table."""
    bar = r"\|"
    rows = [f"| `{one.model_type}` | {one.detail.replace('|', bar)} |" for one in verdicts]
    return "\n".join(["| model type | reason |", "|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every architecture of transformers.")
    parser.add_argument("--type", action="append", metavar="NAME", help="this one alone, repeat")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="workers at a time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    if options.worker:
        if options.device == "cpu":
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        work(options.type, options.device)
        return 0
    model_types = options.type or known_types()
    verdicts: list[Verdict] = []

    def check(some: Sequence[str]) -> None:
        for verdict in sweep(some, options.device):
            verdicts.append(verdict)
            error = f"{verdict.largest_error:.1e}" if verdict.outcome in ("exact", "wrong") else ""
            progress = f"{len(verdicts)}/{len(model_types)}"
            told = f"{progress} {verdict.model_type}: {verdict.outcome} {error} {verdict.detail}"
            print(told, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(check, (model_types[first :: options.jobs] for first in range(options.jobs))))
    verdicts.sort(key=lambda verdict: verdict.model_type)
    if not options.type:
        write_page(verdicts, options.device)
    return int(any(verdict.outcome == "wrong" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
