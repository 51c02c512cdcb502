"""StoppingOptions: when an output ends."""

from penstock.scheduler.executor import Feature
from penstock.server.front.generation import Stopping
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.prompt import check_token_ids
from penstock.server.rpc.mapping_in.token_ids import token_array
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.v1.options_pb2 import StoppingOptions

_STOP_STRINGS = "stopping.stop_strings"
_STOP_IDS = "stopping.stop_token_ids"


def read_stopping(options: StoppingOptions, limits: Limits, violations: Violations) -> Stopping:
    """Stop conditions; max_tokens is checked against the context once the prompt is tokenised."""
    max_tokens: int | None = None
    if options.HasField("max_tokens"):
        max_tokens = violations.integer(
            "stopping.max_tokens", options.max_tokens, 1, limits.max_output_tokens
        )
    most = limits.max_output_tokens if max_tokens is None else max_tokens
    min_tokens = violations.integer("stopping.min_tokens", options.min_tokens, 0, most)
    violations.require_feature(
        Feature.MIN_TOKENS.value,
        "stopping.min_tokens",
        is_supported=min_tokens == 0 or Feature.MIN_TOKENS in limits.features,
    )
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_strings=_stop_strings(options, limits, violations),
        stop_token_ids=_stop_token_ids(options, limits, violations),
        ignore_eos=options.ignore_eos,
        include_stop_string=options.include_stop_string,
    )


def _stop_strings(
    options: StoppingOptions, limits: Limits, violations: Violations
) -> tuple[str, ...]:
    config = limits.config
    if not violations.count(_STOP_STRINGS, len(options.stop_strings), config.max_stop_strings):
        return ()
    for index, text in enumerate(options.stop_strings):
        path = f"{_STOP_STRINGS}[{index}]"
        violations.text_length(path, text, 1, config.max_stop_string_chars)
        num_bytes = len(text.encode())
        if num_bytes > config.max_stop_string_bytes:
            violations.add(
                path,
                f"has {num_bytes} bytes of UTF-8, at most {config.max_stop_string_bytes} are "
                "allowed",
            )
    return tuple(dict.fromkeys(options.stop_strings))


def _stop_token_ids(
    options: StoppingOptions, limits: Limits, violations: Violations
) -> tuple[int, ...]:
    if not violations.count(
        _STOP_IDS, len(options.stop_token_ids), limits.config.max_stop_token_ids
    ):
        return ()
    check_token_ids(token_array(options.stop_token_ids), _STOP_IDS, limits, violations)
    return tuple(dict.fromkeys(options.stop_token_ids))
