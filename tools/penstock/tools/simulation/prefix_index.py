"""A router's estimate of the content of a replica's prefix cache.

Owns an approximation from the outside: the prefixes of the prompts that were sent there, of which
the least recently used are forgotten first. Replicas are not queried, so it
may hold too much or too little.
"""

from collections import OrderedDict

from penstock.server.observe.recording.trace import TraceRequest


class PrefixIndex:
    """Prefix ids by tenant, at most `max_entries` of them: one per `prefix_block_tokens` tokens."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def num_matched_tokens(self, request: TraceRequest) -> int:
        """Tokens of the longest prefix of the prompt that is in the index."""
        num_blocks = 0
        for prefix_id in request.prefix_ids:
            if (request.tenant, prefix_id) not in self._entries:
                break
            num_blocks += 1
        return min(num_blocks * request.prefix_block_tokens, request.num_prompt_tokens)

    def add(self, request: TraceRequest) -> None:
        """The prompt was sent there. Without prefix ids nothing is known of it."""
        # Ends first: a beginning is worth nothing less than what follows it, and is kept longer.
        for prefix_id in reversed(request.prefix_ids):
            key = (request.tenant, prefix_id)
            self._entries[key] = None
            self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
