"""Text on both sides of the model: from text to token ids, and back.

Knows the tokenizer's files; does not know gRPC, protobuf, requests or the engine.
"""
