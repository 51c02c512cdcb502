"""The text, stop strings and token counts of one output."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.text.model_text import ModelText
from penstock.server.text.text_stream import StopStrings, TextDelta, TextStream
from penstock.server.text.tokenizer_settings import to_byte_level
from support.tiny_tokenizers import byte_fallback, byte_level, metaspace, write_model_folder

NOTHING = TextDelta(text="", num_tokens=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText.load(write_model_folder(tmp_path_factory.mktemp("model")))


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text, add_special_tokens=False).ids
    return ids


VOCABULARY = byte_level().get_vocab(True)
BYTE_IDS = [VOCABULARY[to_byte_level(bytes([byte]))] for byte in range(256)]


def letters(text: str) -> list[int]:
    """Return one token per byte of `text`, so that a test controls where tokens end."""
    return [BYTE_IDS[byte] for byte in text.encode()]


def push_each(stream: TextStream, ids: list[int]) -> list[TextDelta]:
    return [stream.push([token_id]) for token_id in ids]


def test_each_token_returns_the_text_that_it_completes(model: ModelText) -> None:
    stream = model.new_stream()
    deltas = push_each(stream, letters("aé🎭b"))
    assert [delta.text for delta in deltas] == ["a", "", "é", "", "", "", "🎭", "b"]
    assert all(delta.num_tokens == 1 for delta in deltas)
    assert stream.finish() == NOTHING
    assert stream.num_tokens == 8


def test_one_token_without_stop_strings_is_its_text(model: ModelText) -> None:
    stream = model.new_stream()
    was_plain = [stream.is_plain]
    assert [stream.push_one(token_id) for token_id in letters("aé")] == ["a", "", "é"]
    assert stream.num_tokens == 3
    stream.finish()
    was_plain.append(stream.is_plain)
    assert was_plain == [True, False]
    assert not model.new_stream(stops=StopStrings(("x",))).is_plain


def test_an_incomplete_character_is_replaced_at_the_end(model: ModelText) -> None:
    stream = model.new_stream()
    assert stream.push(letters("a🎭")[:-1]).text == "a"
    assert stream.finish() == TextDelta(text="�", num_tokens=0)
    assert stream.finish() == NOTHING
    assert stream.push(letters("b")) == NOTHING


def test_special_tokens_are_counted_and_have_no_text(model: ModelText) -> None:
    stream = model.new_stream(stops=StopStrings(["</s>"]))
    end = VOCABULARY["</s>"]
    assert stream.push([*letters("a"), end]) == TextDelta(text="a", num_tokens=2)


def test_text_of_a_possible_stop_is_held_but_its_tokens_are_not(model: ModelText) -> None:
    stream = model.new_stream(stops=StopStrings(["END"]))
    deltas = push_each(stream, letters("xENd!EN"))
    assert [delta.text for delta in deltas] == ["x", "", "", "ENd", "!", "", ""]
    assert {delta.num_tokens for delta in deltas} == {1}
    assert stream.finish() == TextDelta(text="EN", num_tokens=0)


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xEND")])
def test_a_stop_drops_the_tokens_after_it(model: ModelText, include: bool, text: str) -> None:
    stream = model.new_stream(stops=StopStrings(["END"]), include_stop_string=include)
    ids = letters("xEND and more")
    assert stream.push(ids) == TextDelta(text=text, num_tokens=4, stop="END")
    assert stream.is_finished
    assert stream.num_tokens == 4
    assert stream.push(ids) == NOTHING
    assert stream.finish() == NOTHING


def test_a_stop_inside_one_token_cuts_its_text(model: ModelText) -> None:
    ids = ids_of("the gentle rain")
    longest = max(ids, key=lambda token_id: len(byte_level().decode([token_id])))
    text = byte_level().decode([longest])
    stream = model.new_stream(stops=StopStrings([text[2:4]]))
    assert stream.push([longest, longest]) == TextDelta(text=text[:2], num_tokens=1, stop=text[2:4])


def test_a_stop_across_characters_of_several_tokens(model: ModelText) -> None:
    stream = model.new_stream(stops=StopStrings(["é🎭"]))
    ids = letters("aé🎭b")
    deltas = push_each(stream, ids)
    assert "".join(delta.text for delta in deltas) == "a"
    assert [delta.num_tokens for delta in deltas] == [1] * 7 + [0]
    assert deltas[6].stop == "é🎭"


def test_stops_do_not_count_before_the_fewest_tokens(model: ModelText) -> None:
    stream = model.new_stream(stops=StopStrings(["ab"]), min_tokens=4)
    assert stream.push(letters("abxabyab")) == TextDelta(text="abx", num_tokens=5, stop="ab")
    stream = model.new_stream(stops=StopStrings(["ab"]), min_tokens=6)
    assert stream.push(letters("abxabyab")) == TextDelta(text="abxaby", num_tokens=8, stop="ab")


def test_a_stop_may_be_completed_by_the_replacement_at_the_end(model: ModelText) -> None:
    stream = model.new_stream(stops=StopStrings(["a�"]))
    assert stream.push(letters("xaé")[:-1]).text == "x"
    assert stream.finish() == TextDelta(text="", num_tokens=0, stop="a�")


@given(
    text=st.text(alphabet="ab é🎭", max_size=20),
    stops=st.lists(st.text(alphabet="ab é🎭", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 6), max_size=30),
)
def test_the_text_depends_only_on_the_tokens(
    model: ModelText, text: str, stops: list[str], cuts: list[int]
) -> None:
    ids = letters(text)

    def run(chunks: list[list[int]]) -> tuple[str, int, str | None]:
        stream = model.new_stream(stops=StopStrings(stops) if stops else None)
        deltas = [*map(stream.push, chunks), stream.finish()]
        matched: list[str | None] = [delta.stop for delta in deltas if delta.stop is not None]
        (stop,) = matched or [None]
        text = "".join(delta.text for delta in deltas)
        return text, sum(delta.num_tokens for delta in deltas), stop

    borders = [0, *itertools.accumulate(cuts), len(ids) + sum(cuts)]
    cut = [ids[a:b] for a, b in itertools.pairwise(borders)]
    shown, num_tokens, stop = run([ids])
    assert run(cut) == run([[token_id] for token_id in ids]) == (shown, num_tokens, stop)
    if stop is None:
        assert (shown, num_tokens) == (text, len(ids))
    else:
        kept = bytes(BYTE_IDS.index(token_id) for token_id in ids[:num_tokens]).decode()
        assert kept == shown + stop


def test_leading_space_is_kept_when_the_prompt_continues(tmp_path: Path) -> None:
    for name, library in (("fallback", byte_fallback()), ("metaspace", metaspace())):
        model = ModelText.load(write_model_folder(tmp_path / name, library))
        ids = library.encode("mercy is", add_special_tokens=False).ids
        stream = model.new_stream(is_continuation=True)
        assert stream.push(ids).text == " mercy is"
        stream = model.new_stream(is_continuation=False)
        assert "".join(delta.text for delta in push_each(stream, ids)) == "mercy is"


def test_stop_strings_must_not_be_empty() -> None:
    for strings in ([], ["a", ""]):
        with pytest.raises(ValueError, match="empty"):
            StopStrings(strings)


def test_a_stop_token_is_counted_and_has_no_text(model: ModelText) -> None:
    a, b, c = letters("abc")
    stop = frozenset((c,))
    one_by_one = model.new_stream(stop_ids=stop)
    assert [one_by_one.push_one(token_id) for token_id in (a, b, c)] == ["a", "b", ""]
    assert one_by_one.num_tokens == 3
    for stops in (None, StopStrings(["zz"])):
        stream = model.new_stream(stop_ids=stop, stops=stops)
        assert stream.push((a, b, c)) == TextDelta(text="ab", num_tokens=3)
        assert stream.num_tokens == 3
        late = model.new_stream(stop_ids=stop, stops=stops, min_tokens=2)
        assert late.push((c, c, b, c)) == TextDelta(text="ccb", num_tokens=4)
