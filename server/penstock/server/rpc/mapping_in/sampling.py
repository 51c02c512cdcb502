"""SamplingOptions: how tokens are sampled."""

from penstock.scheduler.executor import Feature
from penstock.scheduler.request import SamplingParams
from penstock.server.front.generation import Sampling
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.v1.options_pb2 import OutputOptions, SamplingOptions

_MAX_TEMPERATURE = 2.0
_GREEDY_BELOW = 1e-5
"""Dividing logits by less would overflow; the most likely token is chosen either way."""
_MAX_PENALTY = 2.0
_MAX_BIAS = 100.0


def read_sampling(
    options: SamplingOptions, output: OutputOptions, limits: Limits, violations: Violations
) -> Sampling:
    """Sampling parameters of the executor; unset fields get the contract's defaults."""
    has = options.HasField
    check = violations
    params = SamplingParams(
        temperature=_temperature(options, violations),
        top_k=_top_k(options, limits, violations),
        top_p=(
            check.number_above("sampling.top_p", options.top_p, 0.0, 1.0) if has("top_p") else 1.0
        ),
        min_p=check.number("sampling.min_p", options.min_p, 0.0, 1.0) if has("min_p") else 0.0,
        repetition_penalty=(
            check.number_above(
                "sampling.repetition_penalty", options.repetition_penalty, 0.0, _MAX_PENALTY
            )
            if has("repetition_penalty")
            else 1.0
        ),
        presence_penalty=_penalty("presence_penalty", options.presence_penalty, violations),
        frequency_penalty=_penalty("frequency_penalty", options.frequency_penalty, violations),
        logit_bias=_logit_bias(options, limits, violations),
        num_logprobs=_num_logprobs("logprobs", output, limits, violations),
        num_prompt_logprobs=_num_logprobs("prompt_logprobs", output, limits, violations),
    )
    _require_features(params, limits, violations)
    violations.require_feature(
        Feature.SEED.value,
        "sampling.seed",
        is_supported=not has("seed") or Feature.SEED in limits.features,
    )
    return Sampling(
        params=params,
        seed=options.seed if has("seed") else None,
        num_outputs=(
            check.integer(
                "sampling.num_outputs", options.num_outputs, 1, limits.config.max_num_outputs
            )
            if has("num_outputs")
            else 1
        ),
    )


def _temperature(options: SamplingOptions, violations: Violations) -> float:
    if not options.HasField("temperature"):
        return 1.0
    value = violations.number("sampling.temperature", options.temperature, 0.0, _MAX_TEMPERATURE)
    return 0.0 if value < _GREEDY_BELOW else value


def _penalty(name: str, value: float, violations: Violations) -> float:
    """Unset reads as 0, the default."""
    return violations.number(f"sampling.{name}", value, -_MAX_PENALTY, _MAX_PENALTY)


def _top_k(options: SamplingOptions, limits: Limits, violations: Violations) -> int:
    if not options.HasField("top_k"):
        return 0
    if options.top_k < 1:
        violations.add("sampling.top_k", "must be at least 1")
    # A value of at least the vocabulary size is no restriction, and may overflow the batch's
    # integers.
    return options.top_k if options.top_k < limits.vocab_size else 0


def _logit_bias(
    options: SamplingOptions, limits: Limits, violations: Violations
) -> tuple[tuple[int, float], ...]:
    path = "sampling.logit_bias"
    if not violations.count(path, len(options.logit_bias), limits.config.max_logit_bias):
        return ()
    biases: dict[int, float] = {}
    for index, entry in enumerate(options.logit_bias):
        if entry.token_id >= limits.vocab_size:
            violations.add(f"{path}[{index}].token_id", f"must be below {limits.vocab_size}")
        elif entry.token_id in biases:
            violations.add(f"{path}[{index}].token_id", "is a duplicate")
        biases[entry.token_id] = violations.number(
            f"{path}[{index}].bias", entry.bias, -_MAX_BIAS, _MAX_BIAS
        )
    return tuple(biases.items())


def _num_logprobs(name: str, output: OutputOptions, limits: Limits, violations: Violations) -> int:
    if not output.HasField("logprobs" if name == "logprobs" else "prompt_logprobs"):
        return -1
    value: int = getattr(output, name)
    max_logprobs = min(limits.config.max_logprobs, limits.vocab_size)
    return violations.integer(f"output.{name}", value, 0, max_logprobs)


def _require_features(params: SamplingParams, limits: Limits, violations: Violations) -> None:
    """Refuse features that the executor lacks; neutral values need none."""
    wanted = (
        (params.min_p > 0, Feature.MIN_P, "sampling.min_p"),
        (params.repetition_penalty != 1, Feature.PENALTIES, "sampling.repetition_penalty"),
        (params.presence_penalty != 0, Feature.PENALTIES, "sampling.presence_penalty"),
        (params.frequency_penalty != 0, Feature.PENALTIES, "sampling.frequency_penalty"),
        (bool(params.logit_bias), Feature.LOGIT_BIAS, "sampling.logit_bias"),
        (params.num_logprobs >= 0, Feature.LOGPROBS, "output.logprobs"),
        (params.num_prompt_logprobs >= 0, Feature.PROMPT_LOGPROBS, "output.prompt_logprobs"),
    )
    for is_wanted, feature, path in wanted:
        if is_wanted:
            violations.require_feature(feature.value, path, is_supported=feature in limits.features)
