"""A request of a trace: when it came, how long it was, whose it was. No text, no token ids.

Owns the value that every trace format is read into. Does not know files.
"""

import math
from dataclasses import dataclass

MAX_PREFIX_ID = 2**62
DEFAULT_PREFIX_BLOCK_TOKENS = 512
"""Tokens that one prefix id stands for, as in the Mooncake traces."""


class TraceError(ValueError):
    """A trace cannot be read; the message says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Raises ValueError naming the field that is off.

    `arrival_s`: since the start of the trace. `num_output_tokens`: what it really generated.
    `ttft_deadline_s`, `deadline_s`: seconds after the arrival, infinite for none. Higher `priority`
    is more urgent.

    `prefix_ids`: what the prompt has in common with others, one id for each started block of
    `prefix_block_tokens` tokens, empty where unknown. An id names its block and everything before
    it: two prompts that share an id share all that precedes it.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0
    ttft_deadline_s: float = math.inf
    deadline_s: float = math.inf
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = DEFAULT_PREFIX_BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0.0):
            raise ValueError(f"arrival_s must be finite and not negative, not {self.arrival_s}")
        for name in ("num_prompt_tokens", "num_output_tokens", "prefix_block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("ttft_deadline_s", "deadline_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.prefix_ids:
            num_blocks = -(-self.num_prompt_tokens // self.prefix_block_tokens)
            if len(self.prefix_ids) != num_blocks:
                raise ValueError(
                    f"prefix_ids must hold {num_blocks} ids for {self.num_prompt_tokens} tokens in"
                    f" blocks of {self.prefix_block_tokens}, not {len(self.prefix_ids)}"
                )
            if min(self.prefix_ids) < 0 or max(self.prefix_ids) >= MAX_PREFIX_ID:
                raise ValueError(f"prefix_ids must be in 0 .. {MAX_PREFIX_ID - 1}")
