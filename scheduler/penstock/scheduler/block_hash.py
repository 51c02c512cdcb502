"""Computes chained content hashes of full KV cache blocks: a hash identifies a whole prefix.

The fronts (gRPC server processes) hash prompts, and the engine hashes outputs. A digest is 16 bytes
of BLAKE2b. A collision would give one tenant the keys and values of another. So the hash is
cryptographic, and the chain starts from a salt. The salt contains the tenant unless tenants share
prefixes.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16


def chain_root(salt: bytes) -> bytes:
    """Return the digest of a salt, from which a chain of block hashes starts.

    Only requests with the same salt can share blocks.
    """
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"penstock-kv").digest()


def hash_blocks(
    token_ids: NDArray[np.int32], block_size: int, previous: bytes
) -> tuple[bytes, ...]:
    """Return the digests of the full blocks of `token_ids` int32 [n], chained after `previous`.

    Tokens past the last full block are left out. `previous` is `chain_root(salt)` for the start of
    a prompt or the digest of the previous block.
    """
    data = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    width = 4 * block_size
    digests: list[bytes] = []
    for end in range(width, len(data) + 1, width):
        previous = blake2b(previous + data[end - width : end], digest_size=DIGEST_BYTES).digest()
        digests.append(previous)
    return tuple(digests)
