"""Help texts of the limits that every executor has, under each executor's name for them."""

BLOCK_SIZE = "tokens per KV cache block"
MAX_NUM_SEQS = "maximum number of running requests"
MAX_SEQ_LEN = "maximum length of prompt and output together, tokens"
