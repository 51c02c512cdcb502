"""Turns the text of plays into token sequences for training the demo model.

Contains the split of the text into speeches, the byte-level BPE tokenizer, BPE dropout, and the mix
of documents (long excerpts, short excerpts, chats) in a training sequence.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from other_prompts import other_prompt, sums
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS_TOKEN = "<|begin|>"
EOS_TOKEN = "<|end|>"
BOS_ID = 0
EOS_ID = 1
USER_HEADING = "STRANGER:\n"
ASSISTANT_HEADING = "PLAYER:\n"
NUM_SEGMENTATIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """One speech: the speaker's name (without the colon) and the lines."""

    speaker: str
    body: str

    @property
    def text(self) -> str:
        return f"{self.speaker}:\n{self.body}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The composition of a training sequence; every field is a probability or a mean count.
    `settings_in_chats`: the probability of a system message. `mid_speech_starts`: the probability
    that an excerpt starts inside a speech.

    A sequence is one long excerpt, or is packed from chats and short excerpts, or from speeches
    with prompts of other kinds (other_prompts.py).
    """

    other_prompts: float = 0.0
    sums_in_other_prompts: float = 0.3
    prompts_inside_speeches: float = 0.25
    prompts_in_chats: float = 0.15
    long_excerpts: float = 0.5
    mid_speech_starts: float = 0.3
    chats_in_packed: float = 0.6
    settings_in_chats: float = 0.25
    mean_chat_pairs: float = 2.0
    mean_excerpt_speeches: float = 12.0


def parse_speeches(text: str) -> list[Speech]:
    """Return the speeches of a text in order; a speaker's name without spoken lines is dropped.
    Raises ValueError for fewer than 8 speeches.
    """
    speeches: list[Speech] = []
    for block in text.split("\n\n"):
        speaker, separator, body = block.strip().partition(":\n")
        if separator and body.strip():
            speeches.append(Speech(speaker=speaker.strip(), body=body.strip()))
    if len(speeches) < 8:
        raise ValueError("text: found fewer than 8 speeches of the form 'NAME:' newline, lines")
    return speeches


def split_speeches(
    speeches: Sequence[Speech], *, holdout: float
) -> tuple[list[Speech], list[Speech]]:
    """Return (training, validation); validation is the last part, about a fraction `holdout` of the
    characters.
    """
    lengths = np.cumsum([len(speech.text) + 2 for speech in speeches])
    cut = int(np.searchsorted(lengths, lengths[-1] * (1.0 - holdout)))
    cut = min(max(cut, 1), len(speeches) - 1)
    return list(speeches[:cut]), list(speeches[cut:])


def train_tokenizer(speeches: Sequence[Speech], *, vocab_size: int) -> Tokenizer:
    """Return a trained byte-level BPE tokenizer. Its vocabulary contains all 256 bytes, so that any
    UTF-8 text round-trips.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((speech.text for speech in speeches), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS_TOKEN} $A",
                pair=f"{BOS_TOKEN} $A {BOS_TOKEN}:1 $B:1",
                special_tokens=[(BOS_TOKEN, BOS_ID)],
            ),
        ]
    )
    return tokenizer


class SubwordSampler:
    """Encodes text with BPE dropout from a seeded generator.

    BPE dropout (Provilkov, Emelianenko, Voita, 2020) skips each merge with probability
    `drop_probability`, so that the model sees many segmentations of a word. It is implemented here
    because the implementation in `tokenizers` cannot be seeded. NUM_SEGMENTATIONS segmentations of
    each word are drawn once and reused. Raises ValueError for a tokenizer without a pre-tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, drop_probability: float, generator: np.random.Generator
    ) -> None:
        if tokenizer.pre_tokenizer is None:
            raise ValueError("tokenizer: has no pre-tokenizer")
        self._tokenizer = tokenizer
        self._pre_tokenizer = tokenizer.pre_tokenizer
        self._vocab: dict[str, int] = tokenizer.get_vocab()
        self._drop_probability = drop_probability
        self._generator = generator
        self._word_ids: dict[str, int] = {}
        self._plain: list[list[int]] = []
        self._dropped: list[list[list[int]]] = []
        self._ranks = _merge_ranks(tokenizer)

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt as bitwise complements (negative), so that they are
        excluded from the loss.
        """
        return [~token_id for token_id in self.text(text)]

    def text(self, text: str) -> list[int]:
        """Return the token ids of `text` without dropout; unlike `words`, caches nothing."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def words(self, text: str) -> list[int]:
        """Return the indices of the pre-tokens of `text` in this object's list of words, to which
        new pre-tokens are appended; `spell` converts them to token ids.
        """
        pieces = self._pre_tokenizer.pre_tokenize_str(text)
        return [self._word_id(piece) for piece, _ in pieces]

    def spell(self, words: Sequence[int], *, is_dropped: bool) -> list[int]:
        """Return the words' token ids: with the regular BPE segmentation, or with BPE dropout
        (`is_dropped`).
        """
        ids: list[int] = []
        if not is_dropped:
            for word in words:
                ids.extend(self._plain[word])
            return ids
        picks = self._generator.integers(NUM_SEGMENTATIONS, size=len(words)).tolist()
        for word, pick in zip(words, picks, strict=True):
            ids.extend(self._dropped[word][pick])
        return ids

    def _word_id(self, piece: str) -> int:
        known = self._word_ids.get(piece)
        if known is not None:
            return known
        self._word_ids[piece] = len(self._plain)
        self._plain.append(self._segment(piece, 0.0))
        self._dropped.append(
            [self._segment(piece, self._drop_probability) for _ in range(NUM_SEGMENTATIONS)]
        )
        return self._word_ids[piece]

    def _segment(self, piece: str, drop_probability: float) -> list[int]:
        symbols = list(piece)
        while len(symbols) > 1:
            candidates = [
                (rank, at)
                for at, pair in enumerate(itertools.pairwise(symbols))
                if (rank := self._ranks.get(pair)) is not None
                and (drop_probability == 0.0 or self._generator.random() >= drop_probability)
            ]
            if not candidates:
                break
            _, at = min(candidates)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self._vocab[symbol] for symbol in symbols]


def _merge_ranks(tokenizer: Tokenizer) -> dict[tuple[str, str], int]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {(left, right): rank for rank, (left, right) in enumerate(merges)}


class SequenceSampler:
    """Draws random training sequences from a list of speeches. `dropped_share`: the share of
    excerpts and chats with BPE dropout.
    """

    def __init__(
        self,
        speeches: Sequence[Speech],
        subwords: SubwordSampler,
        *,
        mix: Mix,
        dropped_share: float,
        generator: np.random.Generator,
    ) -> None:
        self._subwords = subwords
        self._mix = mix
        self._generator = generator
        self._headings = [subwords.words(speech.speaker + ":\n") for speech in speeches]
        self._bodies = [subwords.words(speech.body) for speech in speeches]
        self._settings = [speech.body.splitlines()[0].strip() for speech in speeches]
        newline = subwords.words("\n")
        self._line_starts = [
            [0, *(at + 1 for at, word in enumerate(body) if word == newline[0])]
            for body in self._bodies
        ]
        self._user = subwords.words(USER_HEADING)
        self._assistant = subwords.words(ASSISTANT_HEADING)
        # Two pre-tokens, because the pre-tokenizer splits a blank line followed by text.
        self._blank_line = newline * 2
        self.dropped_share = dropped_share

    def batch(self, *, num_sequences: int, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return token ids int64 [num_sequences, num_tokens]. A negative value `~id` stands for the
        token `id` and excludes it from the loss.
        """
        rows = [self._sequence(num_tokens) for _ in range(num_sequences)]
        return np.asarray(rows, dtype=np.int64)

    def _sequence(self, num_tokens: int) -> list[int]:
        ids: list[int] = []
        if self._generator.random() < self._mix.other_prompts:
            while len(ids) < num_tokens:
                ids.extend(self._prompted())
            return ids[:num_tokens]
        if self._generator.random() < self._mix.long_excerpts:
            return self._excerpt(num_tokens, max_speeches=len(self._bodies))
        while len(ids) < num_tokens:
            if self._generator.random() < self._mix.chats_in_packed:
                ids.extend(self._chat())
            else:
                count = int(self._generator.geometric(1.0 / self._mix.mean_excerpt_speeches))
                ids.extend(self._excerpt(num_tokens, max_speeches=count))
        return ids[:num_tokens]

    def _excerpt(self, num_tokens: int, *, max_speeches: int) -> list[int]:
        """Return the token ids of the begin token, consecutive speeches and the end token,
        truncated to `num_tokens`.
        """
        is_dropped = self._draws_dropped()
        at = int(self._generator.integers(len(self._bodies)))
        ids = [BOS_ID]
        for turn in range(max_speeches):
            index = (at + turn) % len(self._bodies)
            if turn:
                words = self._blank_line + self._headings[index] + self._bodies[index]
            else:
                words = self._opening(index)
            ids.extend(self._subwords.spell(words, is_dropped=is_dropped))
            if len(ids) >= num_tokens:
                return ids[:num_tokens]
        return [*ids, EOS_ID]

    def _opening(self, index: int) -> list[int]:
        """Return words (see `SubwordSampler.words`): the speaker's name and the speech, or the
        speech without the name from a random line on.

        The second form exists because prompts often contain no speaker's name.
        """
        if self._generator.random() >= self._mix.mid_speech_starts:
            return self._headings[index] + self._bodies[index]
        start = int(self._generator.choice(self._line_starts[index]))
        return self._bodies[index][start:]

    def _chat(self) -> list[int]:
        """Return the token ids of a chat whose messages are consecutive speeches, in the chat
        template's format.

        Each reply ends with the end token.
        """
        is_dropped = self._draws_dropped()
        num_pairs = int(self._generator.geometric(1.0 / self._mix.mean_chat_pairs))
        at = int(self._generator.integers(1, len(self._bodies)))
        ids = [BOS_ID]
        if self._generator.random() < self._mix.settings_in_chats:
            # The line before the exchange is used as the system message, so that its content is
            # relevant to what follows.
            words = self._subwords.words(f"[{self._settings[at - 1]}]") + self._blank_line
            ids.extend(self._subwords.spell(words, is_dropped=is_dropped))
        for pair in range(num_pairs):
            ask, answer = ((at + 2 * pair + offset) % len(self._bodies) for offset in range(2))
            words = self._blank_line if pair else []
            words = words + self._user + self._bodies[ask] + self._blank_line
            words = words + self._assistant + self._bodies[answer]
            ids.extend(self._subwords.spell(words, is_dropped=is_dropped))
            ids.append(EOS_ID)
        return ids

    def _prompted(self) -> list[int]:
        """Return the token ids of a speech combined with text from other_prompts.py: a prompt, or
        sums with their results.

        The prompt is before the speech, inside it, or in a chat in which the speech is the reply.
        Sums are before the speech. The loss includes the results of sums, and the speech with the
        heading before it, except the part of a speech before a prompt inside it. Only a chat ends
        with the end token.
        """
        index = int(self._generator.integers(len(self._bodies)))
        body = self._bodies[index]
        kind = self._generator.random()
        if kind < self._mix.sums_in_other_prompts:
            ids = [BOS_ID]
            for question, result in sums(self._generator):
                ids += self._subwords.prompt(question) + self._subwords.text(result)
            words = self._blank_line[1:] + self._headings[index] + body
            return ids + self._subwords.spell(words, is_dropped=False)[:30]
        prompt = self._subwords.prompt(other_prompt(self._generator))
        if kind > 1 - self._mix.prompts_inside_speeches:
            at = int(self._generator.integers(len(body)))
            before = self._subwords.spell(body[max(0, at - 8) : at], is_dropped=False)
            after = self._subwords.spell(body[at:], is_dropped=False)[:50]
            return [BOS_ID, *(~token_id for token_id in before), *prompt, *after]
        if kind > 1 - self._mix.prompts_inside_speeches - self._mix.prompts_in_chats:
            before = self._subwords.prompt(USER_HEADING)
            words = self._blank_line + self._assistant + body
            answer = self._subwords.spell(words, is_dropped=False)
            return [BOS_ID, *before, *prompt, *answer, EOS_ID]
        words = self._blank_line + self._headings[index] + body
        return [BOS_ID, *prompt, *self._subwords.spell(words, is_dropped=False)[:70]]

    def _draws_dropped(self) -> bool:
        # A whole document uses one kind of segmentation, so that the model can distinguish the two
        # and predicts the regular segmentation in ordinary text.
        return bool(self._generator.random() < self.dropped_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationText:
    """Documents for measuring the loss: token ids (each document starts with the begin token), and
    the number of characters.
    """

    documents: list[list[int]]
    num_chars: int


def evaluation_text(
    speeches: Sequence[Speech], tokenizer: Tokenizer, *, max_tokens: int
) -> EvaluationText:
    """Return whole speeches, packed in order into documents of at most `max_tokens` tokens.

    A speech longer than that is left out. Documents have no end token, so the loss covers only the
    text.
    """
    documents: list[list[int]] = []
    num_chars = 0
    for text, ids in _packed(speeches, tokenizer, max_tokens):
        documents.append(ids)
        num_chars += len(text)
    return EvaluationText(documents=documents, num_chars=num_chars)


def _packed(
    speeches: Sequence[Speech], tokenizer: Tokenizer, max_tokens: int
) -> Iterator[tuple[str, list[int]]]:
    text, ids = "", list[int]()
    for speech in speeches:
        longer = f"{text}\n\n{speech.text}" if text else speech.text
        longer_ids = tokenizer.encode(longer).ids
        if len(longer_ids) <= max_tokens:
            text, ids = longer, longer_ids
            continue
        if ids:
            yield text, ids
        text, ids = speech.text, tokenizer.encode(speech.text).ids
        if len(ids) > max_tokens:
            text, ids = "", []
    if ids:
        yield text, ids
