"""The text processing of one model: files, tokenizer and detokenizer."""

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
        """Create the text processing. See `Tokenizer` for the arguments.

        Raises ModelFilesError if the chat template is invalid.
        """
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
        """Load the model's text files from a Hugging Face folder. Raises ModelFilesError if a file
        is missing or invalid."""
        return cls(
            ModelFiles.load(path, name=name),
            num_threads=num_threads,
            max_bytes_per_tenant=max_bytes_per_tenant,
        )

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; see `Detokenizer.token_bytes`."""
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

        If `is_continuation`, the output continues the text of the prompt, so a leading space is
        part of the output. An answer in a chat has no leading space. See `TextStream` for
        `min_tokens` and `stop_ids`.
        """
        matcher = None
        if stops is not None:
            matcher = StopMatcher(stops, include_stop_string=include_stop_string)
        decoder = self.detokenizer.new_stream(is_continuation=is_continuation)
        return TextStream(decoder, matcher, min_tokens=min_tokens, stop_ids=stop_ids)

    def close(self) -> None:
        """End the tokenizer's threads."""
        self.tokenizer.close()
