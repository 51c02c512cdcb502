"""Converts text to token ids, and back.

Needs only the text files of the model folder (tokenizer, configuration, chat template). Does not
use gRPC, protobuf, the fronts (gRPC server processes) or the engine.
"""
