"""The shipped model writes readable text after any ASCII prompt."""

from __future__ import annotations

import string

import pytest
from tokenizers import Tokenizer

from penstock.executor.config import ExecutorConfig
from penstock.executor.models import resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import SamplingParams
from support.core import FakeClock, make_spec, outputs, run_until_idle

PROMPTS = (
    *string.digits,
    *string.punctuation,
    "2+2=",
    "3.14159 * 10^-7 = ?",
    "HELLO WORLD",
    "#include <stdio.h>\nint main(void) {\n\treturn 0;\n}\n",
    "https://example.com/path?x=1&y=2",
    '{"key": [1, 2, null], "other": "$5.00"}',
    "SELECT * FROM users WHERE id = 7;",
    "user@example.com",
    string.printable.strip(),
)


def test_any_ascii_prompt_has_readable_text_after_it() -> None:
    pytest.importorskip("torch")
    from penstock.executor.torch.executor import TorchExecutor

    path = resolve_model("demo")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    config = ExecutorConfig(model_path=path, max_num_seqs=64, num_blocks=512)
    engine = Engine(TorchExecutor(config), SchedulerConfig(max_num_batched_tokens=512), FakeClock())
    for key, prompt in enumerate(PROMPTS, start=1):
        # Greedily, and as generation_config.json has it.
        sampling = SamplingParams(temperature=0.8 * (key % 2), top_p=0.95, seed=key)
        ids = tokenizer.encode(prompt).ids
        engine.submit((make_spec(key, ids, max_tokens=30, block_size=16, sampling=sampling),))
    texts = {key: tokenizer.decode(ids) for key, ids in outputs(run_until_idle(engine)).items()}

    assert len(texts) == len(PROMPTS)
    unreadable = {
        PROMPTS[key - 1]: text
        for key, text in texts.items()
        if not set(text) <= set(string.printable) or not any(map(str.isalpha, text))
    }
    assert unreadable == {}
