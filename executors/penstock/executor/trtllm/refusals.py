"""Which failures of a single request are the request's own fault.

Owns the phrases. The engine has one exception for both kinds and tells them apart in words only;
words that are not known here count as the engine's fault, which is never wrong about the client.
"""

_PHRASES = (
    "token id out of range",
    "exceeds",
    "exceed max",
    "prompt length",
    "should not be larger than",
    "lora",
    "grammar",
    "json schema",
    "regex",
    "guided decoding",
)


def is_refusal(message: str) -> bool:
    """Whether the engine's words say that it will not do what was asked."""
    text = message.lower()
    return any(phrase in text for phrase in _PHRASES)
