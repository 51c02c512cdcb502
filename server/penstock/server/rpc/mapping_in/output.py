"""OutputOptions: the content of the stream and how it is split into messages.

The number of logprobs is read in `sampling.py`.
"""

from typing import Final

from penstock.scheduler.request import SamplingParams
from penstock.server.front.generation import ChunkLimits, Output
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.v1.generation_service_pb2 import GenerateRequest
from penstock.v1.options_pb2 import OutputOptions

_MAX_CHUNK_DELAY_S: Final = 10.0
_TOKENS_PATH = "output.min_chunk_tokens"
_DELAY_PATH = "output.max_chunk_delay"


def read_output(
    options: OutputOptions, sampling: SamplingParams, limits: Limits, violations: Violations
) -> Output:
    """The domain value; records what is out of range."""
    return Output(
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        return_token_ids=options.return_token_ids,
        echo=options.echo,
        chunks=_read_chunks(options, limits, violations),
    )


def check_no_chunks(request: GenerateRequest) -> None:
    """For a response in one message. Raises RequestError for options that split the stream."""
    violations = Violations()
    has = request.output.HasField
    for path, is_set in (
        (_TOKENS_PATH, has("min_chunk_tokens")),
        (_DELAY_PATH, has("max_chunk_delay")),
    ):
        if is_set:
            violations.add(path, "must not be set: the response is one message")
    violations.raise_if_any()


def _read_chunks(options: OutputOptions, limits: Limits, violations: Violations) -> ChunkLimits:
    default = ChunkLimits()
    min_tokens, max_delay_s = default.min_tokens, default.max_delay_s
    if options.HasField("min_chunk_tokens"):
        min_tokens = violations.integer(
            _TOKENS_PATH, options.min_chunk_tokens, 1, limits.max_chunk_tokens
        )
    if options.HasField("max_chunk_delay"):
        max_delay_s = violations.duration_s(
            _DELAY_PATH, options.max_chunk_delay, _MAX_CHUNK_DELAY_S, can_be_zero=True
        )
    return ChunkLimits(min_tokens=min_tokens, max_delay_s=max_delay_s)
