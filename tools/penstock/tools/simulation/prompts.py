"""Generates token ids and block hashes for trace requests, which have only lengths and prefix ids.

Deterministic: a prefix id stands for a part of a prompt and all parts before it. Equal prefix ids
of one tenant give equal tokens and block hashes; different prefix ids give different hashes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.block_hash import DIGEST_BYTES, chain_root, hash_blocks
from penstock.server.observe.recording.trace import TraceRequest

_DIGEST = np.dtype([("tenant", "<u4"), ("part", "<u4"), ("prefix_id", "<u8")])
assert _DIGEST.itemsize == DIGEST_BYTES
_STRIDE = np.int64(7919)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A generated prompt. `token_ids` int32 [n], read-only; `hash_salt` and `block_hashes` as in
    `RequestSpec`.
    """

    token_ids: NDArray[np.int32]
    hash_salt: bytes = b""
    block_hashes: tuple[bytes, ...] = ()


class PromptMaker:
    """Generates prompts for one engine's vocabulary and block size.

    The prompt of a request without prefix ids, and every prompt without prefix caching, is a view
    of one shared array of zeros, and has no block hashes. If the block size divides the trace's
    tokens per prefix id, the hash of a block is composed of the tenant, the prefix id and the
    block's position in that part, instead of being computed from the tokens: like a chained hash, a
    prefix id identifies the whole prefix.
    """

    def __init__(self, *, vocab_size: int, block_size: int, has_prefix_caching: bool) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._has_prefix_caching = has_prefix_caching
        self._zeros = _frozen(np.zeros(65_536, dtype=np.int32))

    def make(self, request: TraceRequest, tenant_index: int) -> Prompt:
        """Return the prompt of a request; different tenants (`tenant_index`) never share blocks."""
        if not (request.prefix_ids and self._has_prefix_caching):
            return Prompt(token_ids=self._zero_tokens(request.num_prompt_tokens))
        token_ids = self._tokens(request)
        salt = b"tenant" + tenant_index.to_bytes(4, "little")
        if request.prefix_block_tokens % self._block_size == 0:
            digests = self._composed_digests(request, tenant_index)
        else:
            digests = hash_blocks(token_ids, self._block_size, chain_root(salt))
        return Prompt(token_ids=token_ids, hash_salt=salt, block_hashes=digests)

    def _zero_tokens(self, num_tokens: int) -> NDArray[np.int32]:
        if num_tokens > len(self._zeros):
            self._zeros = _frozen(np.zeros(2 * num_tokens, dtype=np.int32))
        return self._zeros[:num_tokens]

    def _tokens(self, request: TraceRequest) -> NDArray[np.int32]:
        ids = np.array(request.prefix_ids, dtype=np.int64)
        places = np.arange(request.prefix_block_tokens, dtype=np.int64)
        # The first tokens encode the id, with the vocabulary size as the base, so that all blocks
        # differ.
        tokens = (ids[:, None] + _STRIDE * places) % self._vocab_size
        rest = ids
        for place in range(min(request.prefix_block_tokens, 8)):
            tokens[:, place] = rest % self._vocab_size
            rest = rest // self._vocab_size
        return _frozen(tokens.astype(np.int32).ravel()[: request.num_prompt_tokens])

    def _composed_digests(self, request: TraceRequest, tenant_index: int) -> tuple[bytes, ...]:
        num_parts = request.prefix_block_tokens // self._block_size
        digests = np.empty((len(request.prefix_ids), num_parts), dtype=_DIGEST)
        digests["tenant"] = tenant_index
        digests["part"] = np.arange(num_parts, dtype=np.uint32)
        digests["prefix_id"] = np.array(request.prefix_ids, dtype=np.uint64)[:, None]
        data = digests.tobytes()
        num_full = request.num_prompt_tokens // self._block_size
        return tuple(
            data[start : start + DIGEST_BYTES]
            for start in range(0, DIGEST_BYTES * num_full, DIGEST_BYTES)
        )


def _frozen(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    tokens.flags.writeable = False
    return tokens
