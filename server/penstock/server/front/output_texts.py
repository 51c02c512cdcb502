"""The text streams of the outputs of a request.

Owns which parts of a request affect detokenising: stop strings, stop tokens, and the prompt that
the output continues.
"""

from collections.abc import Iterable

from penstock.server.front.generation import ChatInput, Generation
from penstock.server.text.model_text import ModelText
from penstock.server.text.stop_strings import StopStrings
from penstock.server.text.text_stream import TextStream


def output_texts(
    generation: Generation, text: ModelText, stop_ids: Iterable[int]
) -> list[TextStream]:
    """A new one for each output. `stop_ids`: all stop token ids, the model's own included."""
    stopping = generation.stopping
    ending = frozenset(stop_ids)
    stops = StopStrings(stopping.stop_strings) if stopping.stop_strings else None
    return [
        text.new_stream(
            stops=stops,
            include_stop_string=stopping.include_stop_string,
            min_tokens=stopping.min_tokens,
            stop_ids=ending,
            is_continuation=not isinstance(generation.prompt, ChatInput),
        )
        for _ in range(generation.sampling.num_outputs)
    ]
