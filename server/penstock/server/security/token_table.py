"""Static bearer tokens: whose one is.

Owns the look-up. How long it takes tells nothing of the tokens that are known: they are found by a
hash under a key that was drawn at the start, and then compared in constant time.
"""

import hmac
import secrets
from collections.abc import Iterable
from hashlib import blake2b, sha256

from penstock.server.security.policy import StaticToken


class TokenTable:
    """Tokens by their hash. Never holds a token."""

    def __init__(self, tokens: Iterable[StaticToken]) -> None:
        self._key = secrets.token_bytes(32)
        self._tokens = {self._place(token.digest): token for token in tokens}

    def find(self, token: bytes) -> StaticToken | None:
        """Whose token it is, expired or not."""
        digest = sha256(token).digest()
        found = self._tokens.get(self._place(digest))
        if found is None or not hmac.compare_digest(found.digest, digest):
            return None
        return found

    def _place(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._key, digest_size=16).digest()
