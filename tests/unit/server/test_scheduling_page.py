"""docs/scheduling.md: its settings are those of `penstock serve`, its example runs."""

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.client import DeadlineUnreachable, PenstockError
from penstock.client.errors import Failure, error_of
from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.scheduler.config import SchedulerConfig
from penstock.server.cli.quota_options import QUOTA_FLAGS
from penstock.server.cli.serve_options import OPTIONS
from penstock.server.front.config import FrontConfig

PAGE = (Path(__file__).parents[3] / "docs" / "scheduling.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `--([a-z-]+)` \| (.+?) \|", PAGE, re.MULTILINE))
WORDS = {"none": "", "no bound": "None", "no target": "None", "learnt": "None", "1 each": "{}"}
FIELDS = {
    "target-itl-ms": "target_itl_s",
    "foresee-deadlines": "foresees_deadlines",
    "step-prices": "known_prices",
    **{flag: field for field, flag in QUOTA_FLAGS.items()},
}


def test_every_flag_on_the_page_is_one() -> None:
    flags = {option.flag for option in OPTIONS}
    others = {"cost", "calibrate-from"}  # of penstock simulate
    assert set(re.findall(r"`--([a-z-]+)", PAGE)) - others <= flags
    assert len(ROWS) == len(re.findall(r"^\| `--", PAGE, re.MULTILINE)) > 10


@pytest.mark.parametrize("flag", ROWS)
def test_the_defaults_are_those_of_the_settings(flag: str) -> None:
    name = FIELDS.get(flag, flag.replace("-", "_"))
    scheduler, executor = SchedulerConfig(), ExecutorConfig(kind=ExecutorKind.SIMULATED)
    settings = (scheduler, scheduler.tenant_quota, FrontConfig(), executor)
    default: Any = next(getattr(each, name) for each in settings if hasattr(each, name))
    told = WORDS.get(ROWS[flag], ROWS[flag].strip("`"))
    if isinstance(default, bool):
        assert told == ("on" if default else "off")
    elif isinstance(default, int | float):
        assert float(told) == default
    else:
        assert told == str(getattr(default, "value", default))


class Answering:
    """A client whose next answers are these."""

    def __init__(self, *answers: PenstockError | str) -> None:
        self.answers = list(answers)
        self.ttft_deadlines_s: list[float] = []

    async def generate_once(self, prompt: str, *, ttft_deadline_s: float) -> Any:
        self.ttft_deadlines_s.append(ttft_deadline_s)
        answer = self.answers.pop(0)
        if isinstance(answer, PenstockError):
            raise answer
        return type("Answer", (), {"text": answer})


def unreachable(**metadata: str) -> PenstockError:
    return error_of(
        Failure(
            code=grpc.StatusCode.DEADLINE_EXCEEDED,
            message="m",
            reason="DEADLINE_UNREACHABLE",
            retry_after_s=0.0 if "estimate_ms" in metadata else None,
            metadata=metadata,
        )
    )


@pytest.mark.parametrize(
    ("estimate_ms", "asked_s"), [("9000", [2.0, 10.0]), ("90000", [2.0, 2.0]), (None, [2.0])]
)
def test_the_example_does_what_it_says(estimate_ms: str | None, asked_s: list[float]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "scheduling.md", "exec"), names)
    told = {} if estimate_ms is None else {"estimate_ms": estimate_ms}
    client = Answering(unreachable(**told), "text")
    if estimate_ms is None:
        with pytest.raises(DeadlineUnreachable):
            asyncio.run(names["answer"](client, "prompt"))
    else:
        assert asyncio.run(names["answer"](client, "prompt")) == "text"
    assert client.ttft_deadlines_s == asked_s
