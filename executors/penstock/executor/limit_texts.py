"""Help texts of limits that several settings classes have, some under another name."""

BLOCK_SIZE = "tokens per KV cache block"
MAX_NUM_SEQS = "maximum number of running requests"
NUM_BLOCKS = "number of KV cache blocks"
MAX_SEQ_LEN = "maximum length of prompt and output together, tokens"
