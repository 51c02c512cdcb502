"""The front without its wire: live requests, their streams, the engine's news for them."""
