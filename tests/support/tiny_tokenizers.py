"""Tiny tokenizers of every family that the text layer supports, trained on a few lines."""

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

from penstock.server.text.chat_template import ChatMessage
from penstock.server.text.tokenizer import EncodedChat
from penstock.server.text.tokenizer import Tokenizer as ModelTokenizer

LINES = [
    "The quality of mercy is not strain'd, it droppeth as the gentle rain from heaven",
    "héllo wörld, naïve café: 日本語テキスト и русский текст 🎭🎭 👩‍👩‍👧 done.",
    "def f(x):\n    return x + 1\n\n# two  spaces, three   spaces\n",
    "<tag> user assistant system | im_start im_end s /s think",
] * 20

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if mood is defined %}[{{ mood }}]{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{{ message.name }}{{ message.tool_call_id }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """Return a tokenizer of GPT-2's family: byte-level BPE; the post-processor adds the
    begin-of-sequence token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL[1:],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.add_tokens([AddedToken("naïve token\n", normalized=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    return tokenizer


@cache
def whole_words() -> Tokenizer:
    """Return a tokenizer of Llama 3's family: `byte_level`, but a word in the vocabulary is one
    token.

    The spellings of control tokens are in the vocabulary, so such a spelling in a text becomes the
    control token unless the text is split inside it.
    """
    settings: dict[str, Any] = json.loads(byte_level().to_str())
    settings["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    words = Regex(r"\s*\S+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Return a tokenizer of Llama 2's family: BPE as in SentencePiece, with unknown characters as
    byte tokens.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # The trainer would make special tokens of byte tokens; they are ordinary vocabulary.
    settings: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary = settings["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    return Tokenizer.from_str(json.dumps(settings))


@cache
def metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """Return a tokenizer of T5's family: Unigram over words with a leading mark."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme)
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme)
    trainer = UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """Return a tokenizer of BERT's family: WordPiece, where text depends on neighbouring tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


@cache
def without_decoder() -> Tokenizer:
    """Return a tokenizer without a decoder, whose tokens are joined by spaces."""
    settings: dict[str, Any] = json.loads(word_piece().to_str())
    return Tokenizer.from_str(json.dumps(settings | {"decoder": None}))


def write_model_folder(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    config: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face folder without weights. `settings` override tokenizer_config.json."""
    tokenizer = tokenizer or byte_level()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    default_config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.token_to_id("</s>"),
    }
    default_settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder / "config.json", default_config | (config or {}))
    _write(folder / "tokenizer_config.json", default_settings | (settings or {}))
    if generation is not None:
        _write(folder / "generation_config.json", generation)
    return folder


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def encode_chat(
    tokenizer: ModelTokenizer, messages: Sequence[ChatMessage], **options: Any
) -> EncodedChat:
    """Encode a chat prompt as a front does; blocks until it is encoded."""
    return asyncio.run(tokenizer.encode_chat_async(messages, **options))
