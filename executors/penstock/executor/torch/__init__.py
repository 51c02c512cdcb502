"""The torch executor: transformers models on paged keys and values."""
