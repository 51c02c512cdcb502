"""The included model has consistent files and generates readable text, which does not depend on the
other requests in a batch.
"""

from __future__ import annotations

import functools
import json
import string
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from penstock.executor.config import ExecutorConfig
from penstock.executor.models import resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import RequestSpec, SamplingParams
from support.core import FakeClock, make_spec, outputs, run_until_idle

MAX_TOTAL_BYTES = 10_000_000


@functools.cache
def folder() -> Path:
    return Path(str(resources.files("penstock.executor"))) / "models" / "demo"


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(folder() / "tokenizer.json"))


def read_json(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder() / name).read_text(encoding="utf-8"))
    return loaded


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    config = read_json("tokenizer_config.json")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(config["chat_template"]).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
    )


def test_whole_folder_stays_under_ten_megabytes() -> None:
    sizes = [path.stat().st_size for path in folder().rglob("*") if path.is_file()]
    assert sum(sizes) < MAX_TOTAL_BYTES


def test_special_tokens_agree_in_every_file() -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    names = read_json("tokenizer_config.json")
    for kind in ("bos", "eos", "pad"):
        token_id = tokenizer().token_to_id(names[f"{kind}_token"])
        assert token_id is not None
        assert config[f"{kind}_token_id"] == generation[f"{kind}_token_id"] == token_id
    assert config["bos_token_id"] != config["eos_token_id"]
    assert tokenizer().get_vocab_size(with_added_tokens=True) == config["vocab_size"]


@given(st.text().filter(lambda text: "<|" not in text))
@example("👩‍👩‍👧‍👦 你好 אבג e\u0301\u0323 \ufeff \x00\x7f \u2028 ﷽")
@example("  two  spaces \n\n\n\t tabs\r\n ")
@example("e\u0301 is not \u00e9")
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


def test_chat_becomes_a_play_that_the_player_continues() -> None:
    messages = [
        {"role": "system", "content": "A garden, by night."},
        {"role": "user", "content": " Who goes there?\n"},
        {"role": "assistant", "content": "A friend."},
        {"role": "user", "content": "Stand."},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|begin|>[A garden, by night.]\n\n"
        "STRANGER:\nWho goes there?\n\n"
        "PLAYER:\nA friend.<|end|>\n\n"
        "STRANGER:\nStand.\n\n"
        "PLAYER:\n"
    )


def test_next_turn_extends_the_tokens_of_the_last_one() -> None:
    """The prompt of the next turn begins with the previous prompt, the reply and the reply's end
    token.
    """
    question = [{"role": "user", "content": "Who goes there?"}]
    reply = "A friend to this ground."
    first = render(question, add_generation_prompt=True)
    second = render(
        [*question, {"role": "assistant", "content": reply}, {"role": "user", "content": "Go."}],
        add_generation_prompt=True,
    )
    prompt_ids = tokenizer().encode(first, add_special_tokens=False).ids
    reply_ids = tokenizer().encode(reply, add_special_tokens=False).ids
    held = [*prompt_ids, *reply_ids, read_json("config.json")["eos_token_id"]]
    assert tokenizer().encode(second, add_special_tokens=False).ids[: len(held)] == held


def test_rendered_special_tokens_are_single_tokens() -> None:
    config = read_json("config.json")
    messages = [{"role": "user", "content": "Hail!"}, {"role": "assistant", "content": "Hail."}]
    ids = tokenizer().encode(render(messages, add_generation_prompt=False)).ids
    # The second begin token is the tokenizer's own: a rendered chat is encoded without it.
    assert ids.count(config["bos_token_id"]) == 2
    assert ids.count(config["eos_token_id"]) == 1


def engine_of(*, max_num_seqs: int, budget: int) -> Engine:
    pytest.importorskip("torch")
    from penstock.executor.torch.executor import TorchExecutor

    config = ExecutorConfig(
        model_path=resolve_model("demo"), max_num_seqs=max_num_seqs, num_blocks=8 * max_num_seqs
    )
    return Engine(
        TorchExecutor(config), SchedulerConfig(max_num_batched_tokens=budget), FakeClock()
    )


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
    engine = engine_of(max_num_seqs=64, budget=512)
    for key, prompt in enumerate(PROMPTS, start=1):
        # Greedily, and as generation_config.json has it.
        sampling = SamplingParams(temperature=0.8 * (key % 2), top_p=0.95, seed=key)
        ids = tokenizer().encode(prompt).ids
        engine.submit((make_spec(key, ids, max_tokens=30, block_size=16, sampling=sampling),))
    texts = {key: tokenizer().decode(ids) for key, ids in outputs(run_until_idle(engine)).items()}

    assert len(texts) == len(PROMPTS)
    unreadable = {
        PROMPTS[key - 1]: text
        for key, text in texts.items()
        if not set(text) <= set(string.printable) or not any(map(str.isalpha, text))
    }
    assert unreadable == {}


def seeded(key: int, seed: int) -> RequestSpec:
    sampling = SamplingParams(temperature=1.0, seed=seed)
    prompt = [0, 400 + seed, 17, 900, 33]
    return make_spec(key, prompt, max_tokens=30, block_size=16, sampling=sampling)


def test_a_seed_gives_the_same_alone_and_in_a_batch() -> None:
    engine = engine_of(max_num_seqs=8, budget=64)
    together = [seeded(key, seed=key % 4) for key in range(1, 9)]
    for one in together:
        engine.submit((one,))
    in_company = outputs(run_until_idle(engine))

    for one in together[:4]:
        again = seeded(100 + one.key, seed=one.key % 4)
        engine.submit((again,))
        alone = outputs(run_until_idle(engine))[again.key]
        assert len(alone) == 30
        assert in_company[one.key] == alone
        assert in_company[one.key + 4] == alone
