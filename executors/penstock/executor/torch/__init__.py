"""The embedded executor: transformers models as they are, on paged keys and values."""
