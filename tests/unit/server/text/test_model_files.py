"""Which files a model folder must have, and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.server.text.errors import ModelFilesError
from penstock.server.text.model_files import ModelFiles
from support.tiny_tokenizers import byte_level, write_model_folder


def special_id(token: str) -> int:
    token_id = byte_level().token_to_id(token)
    assert token_id is not None
    return token_id


def test_reads_a_folder(tmp_path: Path) -> None:
    files = ModelFiles.load(write_model_folder(tmp_path / "player"))
    assert files.name == "player"
    assert files.architecture == "LlamaForCausalLM"
    assert files.vocab_size == byte_level().get_vocab_size()
    assert files.bos_id == special_id("<s>")
    assert files.eos_ids == (special_id("</s>"),)
    assert (files.bos_token, files.eos_token) == ("<s>", "</s>")
    assert files.chat_template is not None
    assert ModelFiles.load(tmp_path / "player", name="hamlet").name == "hamlet"


def test_end_ids_come_from_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    end = special_id("<|im_end|>")
    folder = write_model_folder(tmp_path, generation={"eos_token_id": [end]})
    assert ModelFiles.load(folder).eos_ids == tuple(sorted((special_id("</s>"), end)))
    folder = write_model_folder(
        tmp_path, generation={"eos_token_id": end}, settings={"eos_token": "<|im_end|>"}
    )
    assert ModelFiles.load(folder).eos_ids == (end,)


def test_the_nested_text_config_is_read(tmp_path: Path) -> None:
    config = {"text_config": {"vocab_size": 2000}}
    files = ModelFiles.load(write_model_folder(tmp_path, config=config))
    assert files.vocab_size == 2000


def test_template_in_its_own_file_comes_first(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, settings={"chat_template": "from settings"})
    assert ModelFiles.load(folder).chat_template == "from settings"
    (folder / "chat_template.jinja").write_text("from file")
    assert ModelFiles.load(folder).chat_template == "from file"


def test_template_of_a_list_is_the_default_one(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = write_model_folder(tmp_path, settings={"chat_template": listed})
    assert ModelFiles.load(folder).chat_template == "d"


def test_no_template_is_no_error(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, settings={"chat_template": None})
    assert ModelFiles.load(folder).chat_template is None


def test_truncation_and_padding_of_the_training_are_dropped(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    assert len(ModelFiles.load(folder).tokenizer.encode("far more than two tokens").ids) > 2


@pytest.mark.parametrize(
    ("config", "settings", "generation", "named", "what"),
    [
        ({"vocab_size": None}, {}, None, "config.json", "vocab_size"),
        ({"vocab_size": "many"}, {}, None, "config.json", "vocab_size must be an integer"),
        ({"vocab_size": 1}, {}, None, "", "outside the vocabulary of 1"),
        ({"text_config": 1}, {}, None, "config.json", "text_config must be an object"),
        ({}, {"eos_token": "<eek>"}, None, "tokenizer_config.json", "eos_token '<eek>'"),
        ({}, {"bos_token": "<boo>"}, None, "tokenizer_config.json", "bos_token '<boo>'"),
        ({}, {}, {"eos_token_id": "x"}, "generation_config.json", "eos_token_id"),
        ({}, {}, {"eos_token_id": [1, "x"]}, "generation_config.json", "eos_token_id"),
        ({}, {"chat_template": 7}, None, "tokenizer_config.json", "chat_template"),
        ({}, {"chat_template": ["x"]}, None, "tokenizer_config.json", "chat_template"),
        ({}, {"chat_template": []}, None, "tokenizer_config.json", '"default"'),
    ],
)
def test_errors_name_the_file_and_the_fault(
    tmp_path: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    generation: dict[str, Any] | None,
    named: str,
    what: str,
) -> None:
    folder = write_model_folder(tmp_path, config=config, settings=settings, generation=generation)
    with pytest.raises(ModelFilesError) as raised:
        ModelFiles.load(folder)
    assert named in str(raised.value)
    assert what in str(raised.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_missing_and_broken_files_are_named(tmp_path: Path, name: str) -> None:
    folder = write_model_folder(tmp_path)
    (folder / name).write_text('{"broken')
    with pytest.raises(ModelFilesError, match=name):
        ModelFiles.load(folder)
    (folder / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFilesError, match=f"{name}: not UTF-8"):
        ModelFiles.load(folder)
    (folder / name).unlink()
    with pytest.raises(ModelFilesError, match=f"{name}: the file is missing"):
        ModelFiles.load(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="not a folder"):
        ModelFiles.load(tmp_path / "nowhere")
