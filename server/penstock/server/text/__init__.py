"""Text on both sides of the model: from a client's words to token ids, from token ids to text.

Knows the tokenizer's files and nothing of gRPC, protobuf, requests or the engine.
"""
