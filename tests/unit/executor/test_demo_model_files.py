"""The demo model's files: complete, small, consistent with one another, and lossless on text."""

from __future__ import annotations

import functools
import json
import math
import struct
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

MAX_TOTAL_BYTES = 10_000_000
NUM_BYTES_PER_WEIGHT = 2


@functools.cache
def folder() -> Path:
    return Path(str(resources.files("penstock.executor"))) / "models" / "demo"


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(folder() / "tokenizer.json"))


def read_json(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder() / name).read_text(encoding="utf-8"))
    return loaded


def weight_shapes() -> dict[str, list[int]]:
    """Shapes by name from the safetensors header; every weight must be bfloat16."""
    with (folder() / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    return {name: entry["shape"] for name, entry in header.items()}


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    config = read_json("tokenizer_config.json")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(config["chat_template"]).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
    )


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_file_is_there_and_readable_by_all(name: str) -> None:
    assert (folder() / name).stat().st_size > 0
    assert (folder() / name).stat().st_mode & 0o444 == 0o444


def test_whole_folder_stays_under_ten_megabytes() -> None:
    sizes = [path.stat().st_size for path in folder().rglob("*") if path.is_file()]
    assert sum(sizes) < MAX_TOTAL_BYTES


def test_config_is_a_tied_llama_with_room_for_long_texts() -> None:
    config = read_json("config.json")
    assert config["model_type"] == "llama"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    # Stored in half precision, computed in float32: a seed then gives the same text in any company.
    assert config["dtype"] == "float32"
    assert config["head_dim"] in (32, 64)
    assert config["max_position_embeddings"] >= 512
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert (
        read_json("tokenizer_config.json")["model_max_length"]
        == (config["max_position_embeddings"])
    )


def test_weights_have_the_shapes_of_the_config() -> None:
    config, shapes = read_json("config.json"), weight_shapes()
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden]}
    expected["model.norm.weight"] = [hidden]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        expected[at + "input_layernorm.weight"] = [hidden]
        expected[at + "post_attention_layernorm.weight"] = [hidden]
        expected[at + "self_attn.q_proj.weight"] = [
            config["num_attention_heads"] * config["head_dim"],
            hidden,
        ]
        expected[at + "self_attn.k_proj.weight"] = [kv_size, hidden]
        expected[at + "self_attn.v_proj.weight"] = [kv_size, hidden]
        expected[at + "self_attn.o_proj.weight"] = [
            hidden,
            config["num_attention_heads"] * config["head_dim"],
        ]
        expected[at + "mlp.gate_proj.weight"] = [mlp, hidden]
        expected[at + "mlp.up_proj.weight"] = [mlp, hidden]
        expected[at + "mlp.down_proj.weight"] = [hidden, mlp]
    assert shapes == expected
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    assert (folder() / "model.safetensors").stat().st_size > num_weights * NUM_BYTES_PER_WEIGHT


def test_special_tokens_agree_in_every_file() -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    names = read_json("tokenizer_config.json")
    for kind in ("bos", "eos", "pad"):
        token_id = tokenizer().token_to_id(names[f"{kind}_token"])
        assert token_id is not None
        assert config[f"{kind}_token_id"] == generation[f"{kind}_token_id"] == token_id
    assert config["bos_token_id"] != config["eos_token_id"]
    assert tokenizer().get_vocab_size(with_added_tokens=True) == config["vocab_size"]


def test_encoding_opens_with_the_begin_token() -> None:
    encoded = tokenizer().encode("ROMEO:\nO gentle night")
    assert encoded.ids[0] == read_json("config.json")["bos_token_id"]
    plain = tokenizer().encode("ROMEO:\nO gentle night", add_special_tokens=False)
    assert encoded.ids[1:] == plain.ids


@given(st.text().filter(lambda text: "<|" not in text))
@example("👩‍👩‍👧‍👦 你好 אבג e\u0301\u0323 \ufeff \x00\x7f \u2028 ﷽")
@example("  two  spaces \n\n\n\t tabs\r\n ")
@example("e\u0301 is not \u00e9")
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token_of_its_own() -> None:
    single = {piece for piece in tokenizer().get_vocab() if len(piece) == 1}
    assert len(single) == 256


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


def test_without_a_generation_prompt_the_chat_ends_where_its_last_message_does() -> None:
    assert render([{"role": "user", "content": "Stand."}], add_generation_prompt=False) == (
        "<|begin|>STRANGER:\nStand.\n\n"
    )


def test_next_turn_extends_the_tokens_of_the_last_one() -> None:
    """A reply and its end token, appended to the prompt, are a prefix of the next prompt."""
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
