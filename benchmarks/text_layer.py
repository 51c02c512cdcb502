"""The cost of text processing in a front-end process: per streamed token, per encoded kilobyte, and
at start-up.

Streams get one token per push, as with a client that reads fast enough. Uses the packaged model
unless another folder is given; the large vocabulary is synthetic.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.executor.models import resolve_model
from penstock.server.text.chat_template import ChatMessage
from penstock.server.text.detokenizer import Detokenizer
from penstock.server.text.model_text import ModelText
from penstock.server.text.text_stream import StopStrings, TextStream
from report import arguments, at_most, conclude, print_table

PROSE = (
    "Now is the winter of our discontent made glorious summer; and all the clouds that lour'd "
    "upon our house in the deep bosom of the ocean buried. Grim-visaged war hath smooth'd.\n"
) * 6
OTHER = "héllo wörld — naïve café: 日本語テキスト и русский текст 🎭 done.\n" * 16
ONE_STOP = StopStrings(["\n\nUser:"])
SIXTEEN_STOPS = StopStrings([f"\n{letter}: stop it now!" for letter in "abcdefghijklmnop"])
LARGE_VOCABULARY = 128_000

Rows = dict[str, float]


def median_us(action: Callable[[], object], num_repeats: int) -> float:
    """Return the median wall time of one call, microseconds."""
    times: list[float] = []
    for _ in range(num_repeats):
        start = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def per_token_us(make: Callable[[], TextStream], ids: list[int], num_repeats: int) -> float:
    """Return the median cost of one token, over complete streams, microseconds."""

    def run() -> None:
        stream = make()
        for token_id in ids:
            stream.push((token_id,))
        stream.finish()

    return median_us(run, num_repeats) / len(ids)


def measure_streams(model: ModelText, num_repeats: int) -> Rows:
    prose = model.tokenizer.encode(PROSE, add_special_tokens=False).tolist()
    other = model.tokenizer.encode(OTHER, add_special_tokens=False).tolist()
    batches = [prose[start : start + 16] for start in range(0, len(prose), 16)]

    def in_batches() -> None:
        stream = model.new_stream()
        for batch in batches:
            stream.push(batch)

    def alone() -> None:
        decoder = model.detokenizer.new_stream()
        for token_id in prose:
            decoder.push((token_id,))

    def library() -> None:
        stream = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        for token_id in prose:
            stream.step(model.files.tokenizer, token_id)

    return {
        "detokenise": per_token_us(model.new_stream, prose, num_repeats),
        "detokenise, 16 tokens a push": median_us(in_batches, num_repeats) / len(prose),
        "detokenise, many scripts": per_token_us(model.new_stream, other, num_repeats),
        "with 1 stop string": per_token_us(
            lambda: model.new_stream(stops=ONE_STOP), prose, num_repeats
        ),
        "with 16 stop strings": per_token_us(
            lambda: model.new_stream(stops=SIXTEEN_STOPS), prose, num_repeats
        ),
        "the detokenizer alone": median_us(alone, num_repeats) / len(prose),
        "the library's DecodeStream": median_us(library, num_repeats) / len(prose),
    }


def measure_encoding(model: ModelText, num_repeats: int) -> Rows:
    text = PROSE[:1024]
    forged = text[:1000] + model.files.eos_token
    chat = [ChatMessage(role="user", content=text)]

    async def in_thread() -> float:
        return await median_async_us(lambda: model.tokenizer.encode_async(text), num_repeats)

    rows = {
        "encode 1 KiB": median_us(lambda: model.tokenizer.encode(text), num_repeats),
        "encode 1 KiB, the library alone": median_us(
            lambda: model.files.tokenizer.encode(text).ids, num_repeats
        ),
        "encode 1 KiB in a thread": asyncio.run(in_thread()),
        "encode 1 KiB with a forged token": median_us(
            lambda: model.tokenizer.encode(forged), num_repeats
        ),
        "encode 64 characters": median_us(lambda: model.tokenizer.encode(text[:64]), num_repeats),
    }
    if model.tokenizer.has_chat_template:
        rows["render and encode 1 KiB of chat in a thread"] = asyncio.run(
            median_async_us(lambda: model.tokenizer.encode_chat_async(chat), num_repeats)
        )
    return rows


async def median_async_us(action: Callable[[], object], num_repeats: int) -> float:
    """Return the median wall time of awaiting one call, microseconds."""
    times: list[float] = []
    for _ in range(num_repeats):
        start = time.perf_counter_ns()
        await action()  # type: ignore[misc]  # an awaitable of anything
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def measure_start(folder: Path, num_repeats: int) -> Rows:
    """Return the start-up times, milliseconds."""
    large = large_tokenizer()

    def load() -> None:
        ModelText.load(folder).close()

    return {
        "load the model's folder": median_us(load, num_repeats) / 1000,
        f"table of {LARGE_VOCABULARY} tokens": median_us(lambda: Detokenizer(large), num_repeats)
        / 1000,
    }


def large_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with a byte-level vocabulary of production size.

    It has no merges, because only the vocabulary table is used.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    while len(vocabulary) < LARGE_VOCABULARY:
        index = len(vocabulary)
        size = 3 + index % 6
        token = "".join(alphabet[(index * 7919 >> shift) % 256] for shift in range(size))
        vocabulary[f"Ġ{token}{index:x}"] = index
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="demo", help="name or folder of the model")
    options = parser.parse_args()
    folder = resolve_model(options.model)
    num_repeats = 2000 if options.full else 200
    model = ModelText.load(folder)
    streams = measure_streams(model, num_repeats)
    encoding = measure_encoding(model, num_repeats)
    start = measure_start(folder, 20 if options.full else 5)
    model.close()
    print_table("Streams", ("case", "µs per token"), list(streams.items()))
    print_table("Encoding", ("case", "µs"), list(encoding.items()))
    print_table("Start-up", ("case", "ms"), list(start.items()))
    checks = [at_most("detokenise one token", streams["detokenise"], 1.0, "µs")]
    conclude(options, {"streams": streams, "encoding": encoding, "start": start}, checks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
