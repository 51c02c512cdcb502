"""Converts text to token ids, and back.

Depends only on the files of the tokenizer. Does not use gRPC, protobuf, requests or the engine.
"""
