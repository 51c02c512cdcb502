"""Measures how long a front (gRPC server process) takes to process the text of a streamed token.

The text of a stream gets one token at a time, as with a client that reads fast enough, or 16 for
comparison. Uses the packaged demo model unless `--model` is given.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable

import tokenizers

from penstock.executor.models import resolve_model
from penstock.server.text.model_text import ModelText
from penstock.server.text.text_stream import StopStrings
from report import Outcome, arguments, at_most, print_rows, run

PROSE = (
    "Now is the winter of our discontent made glorious summer; and all the clouds that lour'd "
    "upon our house in the deep bosom of the ocean buried. Grim-visaged war hath smooth'd.\n"
) * 6
OTHER = "héllo wörld — naïve café: 日本語テキスト и русский текст 🎭 done.\n" * 16
STOPS = StopStrings([f"\n{letter}: stop it now!" for letter in "abcdefghijklmnop"])


def measure(options: Namespace) -> Outcome:
    """Measure complete streams; report the median time per token."""
    model = ModelText.load(resolve_model(options.model))
    prose, other = (
        model.tokenizer.encode(text, add_special_tokens=False).tolist() for text in (PROSE, OTHER)
    )

    def streamed(ids: list[int], size: int = 1, stops: StopStrings | None = None) -> None:
        stream = model.new_stream() if stops is None else model.new_stream(stops=stops)
        for start in range(0, len(ids), size):
            stream.push(tuple(ids[start : start + size]))
        stream.finish()

    def library() -> None:
        stream = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        for token_id in prose:
            stream.step(model.files.tokenizer, token_id)

    cases: dict[str, tuple[Callable[[], None], int]] = {
        "detokenise": (lambda: streamed(prose), len(prose)),
        "16 tokens a push": (lambda: streamed(prose, 16), len(prose)),
        "many scripts": (lambda: streamed(other), len(other)),
        "16 stop strings": (lambda: streamed(prose, stops=STOPS), len(prose)),
        "the library's DecodeStream": (library, len(prose)),
    }
    times_us: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(2000 if options.full else 200):
        for name, (case, num_tokens) in cases.items():
            begun_ns = time.perf_counter_ns()
            case()
            times_us[name].append((time.perf_counter_ns() - begun_ns) / 1e3 / num_tokens)
    model.close()
    found = {name: statistics.median(values) for name, values in times_us.items()}
    print_rows("Streams, µs per token", [found])
    return found, [at_most("detokenise one token", found["detokenise"], 1.0, "µs")]


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--model", default="demo", help="name or folder of the model")
    run(parser, measure)
