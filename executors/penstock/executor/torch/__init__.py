"""The torch executor: runs transformers models with a paged KV cache."""
