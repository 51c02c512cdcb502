"""Defines a recorded request: one line of a workload trace. It has no text and no token ids.

Recordings have one JSON object per line, as `msgspec.json` encodes a value: `TraceRequest` in the
file of requests, the scheduler's `StepMeasure` in the file of steps.
"""

import math

import msgspec

from penstock.scheduler.cost_model import StepMeasure
from penstock.server.tenants import MAX_PRIORITY

MAX_PREFIX_ID = 2**62
MAX_REQUEST_TOKENS = 2**24
"""Maximum length of a prompt or an output, in tokens."""
MAX_ARRIVAL_S = 1e10
"""Maximum arrival time: 300 years. Beyond it floats cannot represent microseconds."""
DEFAULT_PREFIX_BLOCK_TOKENS = 512
"""Number of tokens per prefix id, as in the Mooncake traces."""


class TraceError(ValueError):
    """A trace cannot be read. The message has the place in the file and the reason."""


def check_text(name: str, text: str) -> None:
    """Raise ValueError, naming the field `name`, if `text` cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be Unicode text, not {text!a}") from None


def check_length(name: str, num_tokens: int) -> None:
    """Raise ValueError, naming the field `name`, if `num_tokens` is outside the valid range."""
    if num_tokens < 1:
        raise ValueError(f"{name} must be at least 1, not {num_tokens}")
    if num_tokens > MAX_REQUEST_TOKENS:
        raise ValueError(f"{name} must be at most {MAX_REQUEST_TOKENS}")


_FIELD_NAMES = {"num_prompt_tokens": "prompt_tokens", "num_output_tokens": "output_tokens"}
"""Maps a field to its name in a file, where they differ. Error messages use the name in a file."""


class TraceRequest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename=_FIELD_NAMES,
):
    """One request of a workload trace. An invalid value raises ValueError, which names the field.

    `arrival_s` is in seconds since the start of the trace. `num_output_tokens` is the number of
    generated tokens. `ttft_deadline_s` and `deadline_s` are in seconds after the arrival, infinite
    if there is none. A higher `priority` is more urgent.

    `prefix_ids` has one id for each block of `prefix_block_tokens` prompt tokens, including a
    partial last block; it is empty if the ids are unknown. An id identifies its block and
    everything before it: prompts that share an id are equal up to the end of that block.
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
        self._check_numbers()
        # Nearly all traces have no tenants.
        if self.tenant:
            check_text("tenant", self.tenant)
        if self.prefix_ids:
            self._check_prefix_ids()

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0.0):
            raise ValueError(f"arrival_s must be finite and not negative, not {self.arrival_s}")
        if self.arrival_s > MAX_ARRIVAL_S:
            raise ValueError(f"arrival_s must be at most {MAX_ARRIVAL_S:g}, not {self.arrival_s:g}")
        for name in ("num_prompt_tokens", "num_output_tokens", "prefix_block_tokens"):
            check_length(_FIELD_NAMES.get(name, name), getattr(self, name))
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be in {-MAX_PRIORITY} .. {MAX_PRIORITY}")
        for name in ("ttft_deadline_s", "deadline_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
            if getattr(self, name) == math.inf:
                # msgspec omits a float only if it is the same object as the default.
                msgspec.structs.force_setattr(self, name, math.inf)

    def _check_prefix_ids(self) -> None:
        num_blocks = -(-self.num_prompt_tokens // self.prefix_block_tokens)
        if len(self.prefix_ids) != num_blocks:
            raise ValueError(
                f"prefix_ids must hold {num_blocks} ids for {self.num_prompt_tokens} tokens in"
                f" blocks of {self.prefix_block_tokens}, not {len(self.prefix_ids)}"
            )
        if min(self.prefix_ids) < 0 or max(self.prefix_ids) >= MAX_PREFIX_ID:
            raise ValueError(f"prefix_ids must be in 0 .. {MAX_PREFIX_ID - 1}")


def json_line(value: TraceRequest | StepMeasure) -> str:
    """Return `value` as JSON: one line of a recorded file, without its newline."""
    return msgspec.json.encode(value).decode()
