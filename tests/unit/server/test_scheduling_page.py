"""docs/scheduling.md: its flags are those of `penstock serve`, its example runs."""

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.client import DeadlineUnreachable, PenstockError
from penstock.client.errors import Failure, error_of
from penstock.server.config import SETTINGS

PAGE = (Path(__file__).parents[3] / "docs" / "scheduling.md").read_text(encoding="utf-8")


def test_every_flag_on_the_page_is_one() -> None:
    flags = {option.flag for option in SETTINGS}
    others = {"cost", "calibrate-from"}  # of penstock simulate
    assert set(re.findall(r"`--([a-z-]+)", PAGE)) - others <= flags


class Answering:
    """A client whose next answers are these."""

    def __init__(self, *answers: PenstockError | str) -> None:
        self.answers = list(answers)
        self.ttft_timeouts_s: list[float] = []

    async def generate_once(self, prompt: str, *, ttft_timeout_s: float) -> Any:
        self.ttft_timeouts_s.append(ttft_timeout_s)
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
    assert client.ttft_timeouts_s == asked_s
