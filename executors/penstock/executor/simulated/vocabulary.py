"""The token ids that the simulated executor generates: those with readable text, if a tokenizer is
known.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import MAX_STOP_IDS


def generated_ids(folder: Path | None, vocab_size: int) -> NDArray[np.int32]:
    """Return the ids below `vocab_size` that the tokenizer in `folder` decodes to printable ASCII,
    int32 [n].

    Returns all ids below `vocab_size` without a tokenizer, without the package tokenizers, for a
    file that the package rejects, or if stop ids could exclude all readable ids.
    """
    readable = [] if folder is None else _readable_ids(folder / "tokenizer.json", vocab_size)
    if len(readable) <= MAX_STOP_IDS:
        return np.arange(vocab_size, dtype=np.int32)
    return np.array(readable, dtype=np.int32)


def _readable_ids(file: Path, vocab_size: int) -> list[int]:
    if find_spec("tokenizers") is None or not file.is_file():
        return []
    # Imported here: the executor also runs without the package.
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    # The library raises plain Exception for all errors in the file, which the fronts report.
    except Exception:
        return []
    texts = (tokenizer.decode([token]) for token in range(vocab_size))
    return [token for token, text in enumerate(texts) if _is_readable(text)]


def _is_readable(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()
