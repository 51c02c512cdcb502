"""The text processing of one model: files, tokenizer and detokenizer.

Knows neither requests nor the engine.
"""

from pathlib import Path

from penstock.server.text.detokenizer import Detokenizer
from penstock.server.text.model_files import ModelFiles
from penstock.server.text.text_stream import StopMatcher, StopStrings, TextStream
from penstock.server.text.tokenizer import MAX_BYTES_PER_TENANT, Tokenizer


class ModelText:
    """The tokenizer, detokenizer and files of one model in one process."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        num_threads: int = 2,
        max_bytes_per_tenant: int = MAX_BYTES_PER_TENANT,
    ) -> None:
        """See `Tokenizer`. Raises ModelFilesError if the chat template is not valid."""
        self.files = files
        self.tokenizer = Tokenizer(
            files, num_threads=num_threads, max_bytes_per_tenant=max_bytes_per_tenant
        )
        self.detokenizer = Detokenizer(files.tokenizer, vocab_size=files.vocab_size)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str | None = None,
        num_threads: int = 2,
        max_bytes_per_tenant: int = MAX_BYTES_PER_TENANT,
    ) -> "ModelText":
        """Load the model's text files from a Hugging Face folder. Raises ModelFilesError."""
        return cls(
            ModelFiles.load(path, name=name),
            num_threads=num_threads,
            max_bytes_per_tenant=max_bytes_per_tenant,
        )

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None if they depend on its neighbours."""
        return self.detokenizer.token_bytes(token_id)

    def new_stream(
        self,
        *,
        stops: StopStrings | None = None,
        include_stop_string: bool = False,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        is_continuation: bool = True,
    ) -> TextStream:
        """Create the text stream of one output.

        `is_continuation`: the output continues the prompt's text, so a leading space belongs to it;
        an answer in a chat starts without one. `min_tokens`, `stop_ids`: see `TextStream`.
        """
        matcher = None
        if stops is not None:
            matcher = StopMatcher(stops, include_stop_string=include_stop_string)
        decoder = self.detokenizer.new_stream(is_continuation=is_continuation)
        return TextStream(decoder, matcher, min_tokens=min_tokens, stop_ids=stop_ids)

    def close(self) -> None:
        """End the tokenizer's threads."""
        self.tokenizer.close()
