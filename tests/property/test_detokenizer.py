"""Streamed text equals the text decoded at once, for every tokenizer family and any split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.server.text.detokenizer import Detokenizer
from support.tiny_tokenizers import (
    byte_fallback,
    byte_level,
    metaspace,
    without_decoder,
    word_piece,
)

CUTS = st.lists(st.integers(1, 7), max_size=30)
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["héllo wörld 日本語 🎭🎭 done", "  two  spaces", " <s> x", "e\u0301 👩‍👩‍👧", "�a�", "it 's"]
)


def streamed(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> str:
    stream = detokenizer.new_stream()
    texts: list[str] = []
    start = 0
    for size in [*cuts, len(ids)]:
        chunk = ids[start : start + size]
        start += size
        # All ways of pushing, in one stream.
        if size % 3 == 0:
            texts.append(stream.push(chunk))
        elif size % 3 == 1:
            texts.extend(stream.push_one(token_id) for token_id in chunk)
        else:
            texts.extend(stream.pieces(chunk))
    return "".join(texts) + stream.flush()


def is_valid_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def byte_runs(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    """Return the bytes of each run of byte-fallback tokens. Special tokens do not end a run."""
    runs: list[bytes] = [b""]
    for token_id in ids:
        token = tokenizer.id_to_token(token_id) or ""
        if token.startswith("<0x"):
            runs[-1] += bytes([int(token[3:5], 16)])
        elif token not in ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"):
            runs.append(b"")
    return runs


@st.composite
def random_ids(draw: st.DrawFn, make: Callable[[], Tokenizer], num_extra: int = 0) -> list[int]:
    size = make().get_vocab_size()
    return draw(st.lists(st.integers(0, size - 1 + num_extra), max_size=40))


@given(ids=random_ids(byte_level, num_extra=3), cuts=CUTS)
def test_byte_level_stream_equals_decode_for_any_ids(ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(byte_level(), vocab_size=byte_level().get_vocab_size() + 3)
    assert detokenizer.token_bytes(0) is not None
    assert streamed(detokenizer, ids, cuts) == byte_level().decode(ids, skip_special_tokens=True)


@given(ids=random_ids(byte_level), cuts=CUTS)
def test_special_tokens_give_text_when_asked_for(ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(byte_level(), skip_special_tokens=False)
    assert streamed(detokenizer, ids, cuts) == byte_level().decode(ids, skip_special_tokens=False)


@given(text=TEXT, cuts=CUTS)
def test_byte_level_text_is_returned(text: str, cuts: list[int]) -> None:
    ids = byte_level().encode(text, add_special_tokens=False).ids
    assert streamed(Detokenizer(byte_level()), ids, cuts) == byte_level().decode(ids)


@given(ids=random_ids(byte_fallback), cuts=CUTS)
def test_byte_fallback_stream_equals_decode_of_well_formed_ids(
    ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(byte_fallback())
    assert detokenizer.token_bytes(0) is not None
    text = streamed(detokenizer, ids, cuts)
    assert text == detokenizer.decode(ids)
    if all(is_valid_utf8(run) for run in byte_runs(byte_fallback(), ids)):
        assert text == byte_fallback().decode(ids, skip_special_tokens=True)


@given(text=TEXT, keep=st.integers(0, 60), cuts=CUTS)
def test_byte_fallback_text_is_returned_even_if_cut(text: str, keep: int, cuts: list[int]) -> None:
    ids = byte_fallback().encode(text, add_special_tokens=False).ids[:keep]
    runs = byte_runs(byte_fallback(), ids)
    text = streamed(Detokenizer(byte_fallback()), ids, cuts)
    whole = byte_fallback().decode(ids, skip_special_tokens=True)
    if is_valid_utf8(runs[-1]):
        assert text == whole
    else:
        # The library gives up the last run's complete characters with the broken one.
        assert text.endswith("�")
        assert len(text.encode()) <= len(whole.encode())


def test_a_stripped_space_does_not_depend_on_broken_bytes_after_it() -> None:
    vocabulary = byte_fallback().get_vocab(True)
    word = next(token for token in sorted(vocabulary) if token.startswith("▁") and token != "▁")
    ids = [vocabulary[word], vocabulary["<0xE3>"], vocabulary["m"]]
    for cuts in ([], [1], [2], [1, 1]):
        assert streamed(Detokenizer(byte_fallback()), ids, cuts) == f"{word[1:]}�m"


@pytest.mark.parametrize("data", ["é".encode()[:1], "日".encode()[:2], "🎭".encode()[:3], b"\xff"])
def test_broken_bytes_alone_are_replaced_one_by_one_as_the_library_does(data: bytes) -> None:
    vocabulary = byte_fallback().get_vocab(True)
    ids = [vocabulary[f"<0x{byte:02X}>"] for byte in data]
    assert streamed(Detokenizer(byte_fallback()), ids, []) == byte_fallback().decode(ids)
    whole = [*ids, vocabulary["m"]]
    assert streamed(Detokenizer(byte_fallback()), whole, [1]) == byte_fallback().decode(whole)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@given(data=st.data(), cuts=CUTS)
def test_metaspace_stream_equals_decode_for_any_ids(
    scheme: str, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = metaspace(scheme)
    ids = data.draw(random_ids(lambda: tokenizer))
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.token_bytes(0) is not None
    assert streamed(detokenizer, ids, cuts) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [word_piece, without_decoder])
@given(data=st.data(), cuts=CUTS)
def test_other_decoders_stream_through_a_window(
    make: Callable[[], Tokenizer], data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = make()
    ids = data.draw(random_ids(make))
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.token_bytes(0) is None
    assert streamed(detokenizer, ids, cuts) == tokenizer.decode(ids, skip_special_tokens=True)
