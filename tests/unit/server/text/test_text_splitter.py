"""A long text that is tokenised in parts gives the same tokens as the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from penstock.server.text import text_splitter
from penstock.server.text.text_splitter import TextSplitter
from support.tiny_tokenizers import byte_fallback, byte_level, metaspace, whole_words, word_piece

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
TEXTS = st.lists(
    st.sampled_from(
        [*"ab'sé日本。，.,1 \n\t", "  ", "\r\n", "word", "it's", "e\u0301", "\u0301", "🎭", " \n "]
    ),
    max_size=60,
).map("".join)


def split_by(pattern: str) -> Tokenizer:
    tokenizer = without_odd_tokens()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def without_odd_tokens() -> Tokenizer:
    return Tokenizer.from_str(byte_level().to_str().replace(r"naïve token\n", "naïve_token"))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


CUTTABLE: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": without_odd_tokens,
    "Llama 3": lambda: split_by(LLAMA_3),
    "Qwen 2": lambda: split_by(QWEN_2),
    "T5": metaspace,
}


@pytest.mark.parametrize("name", CUTTABLE)
@given(text=TEXTS)
def test_the_slices_have_the_tokens_of_the_whole_text(name: str, text: str) -> None:
    tokenizer = CUTTABLE[name]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_splitter, "SLICE_CHARS", 1)
        slices = list(TextSplitter(tokenizer).slices(text))
    assert "".join(slices) == text
    assert [i for part in slices for i in ids_of(tokenizer, part)] == ids_of(tokenizer, text)


@pytest.mark.parametrize("name", CUTTABLE)
def test_a_long_text_is_cut_into_slices_of_a_size(name: str) -> None:
    text = "the gentle rain. " * 20_000
    slices = list(TextSplitter(CUTTABLE[name]()).slices(text))
    assert max(map(len, slices)) < text_splitter.SLICE_CHARS + 20
    assert "".join(slices) == text


def test_a_text_without_a_safe_split_point_is_not_split() -> None:
    text = "x1" * 100_000
    assert list(TextSplitter(without_odd_tokens()).slices(text)) == [text]


@pytest.mark.parametrize(
    "make", [byte_fallback, word_piece, whole_words, lambda: split_by(LLAMA_3 + r"|\p{L}+ x")]
)
def test_text_of_an_unsupported_tokenizer_is_not_split(make: Callable[[], Tokenizer]) -> None:
    text = "the gentle rain " * 20_000
    assert list(TextSplitter(make()).slices(text)) == [text]


@pytest.mark.parametrize(
    "token",
    [AddedToken("a b"), AddedToken("<x>", rstrip=True), AddedToken("<x>", single_word=True)],
)
def test_added_tokens_that_may_span_a_cut_disable_splitting(token: AddedToken) -> None:
    tokenizer = split_by(LLAMA_3)
    text = "the gentle rain " * 20_000
    assert len(list(TextSplitter(tokenizer).slices(text))) > 1
    tokenizer.add_tokens([token])
    assert list(TextSplitter(tokenizer).slices(text)) == [text]
