"""How a generation is to be done: the contract's option groups as frozen values.

Owns the groups and `GenerationRequest`, and the flat keyword form of them. None always means "not
said": the server's default, written in the contract, applies. Ranges are checked by the server,
whose limits `get_model` tells. Durations are seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeAlias, TypedDict

from penstock.client.prompt import Prompt, PromptLike, as_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn.

    `temperature` 0 is greedy. `top_k`, `top_p`, `min_p` cut the distribution. `logit_bias`: pairs
    of token id and what is added to its logit. `seed` makes the output reproducible. `n`: how many
    independent outputs.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingOptions:
    """When an output ends: after `max_tokens`, at the first of `stop`, after a `stop_token_ids`."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What comes back, and how often.

    `logprobs`, `prompt_logprobs`: 0 for the chosen token alone, k for the k most likely as well.
    `min_chunk_tokens` holds output back until that many tokens are there, at most for
    `max_chunk_delay_s`.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    echo: bool = False
    min_chunk_tokens: int | None = None
    max_chunk_delay_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """How urgent, and how long the answer is worth anything. Seconds from arrival at the server.

    A higher `priority` is more urgent. `ttft_timeout_s` (first token) and `total_timeout_s` fail
    the request; `time_limit_s` ends it well and keeps the text.
    """

    priority: int | None = None
    ttft_timeout_s: float | None = None
    total_timeout_s: float | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Reuse of KV cache: with whom it is shared, which dialogue it belongs to, how long it stays.

    A higher `retention_level` keeps the blocks longer, for `retention_s` after the end.
    """

    cache_salt: str | None = None
    session_id: str | None = None
    retention_level: int | None = None
    retention_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchemaConstraint:
    """The output is a JSON document that fits `schema`, itself JSON text; "{}" allows any."""

    schema: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexConstraint:
    """The output matches `pattern` as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConstraint:
    """The output is a sentence of the grammar `ebnf` (as of GBNF, start symbol `root`)."""

    ebnf: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConstraint:
    """The output is exactly one of `choices`."""

    choices: tuple[str, ...]


Constraint: TypeAlias = (
    JsonSchemaConstraint | RegexConstraint | GrammarConstraint | ChoiceConstraint
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank adapter, by a name of `Model.adapters`; `scale` is its strength, 1 unless said."""

    name: str
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation. `model` None: the server's default; `request_id` None: given by the server.

    Name a request to cancel it from elsewhere, or to guard against submitting it twice.
    `resume_grace_s`: how long it outlives a lost connection, None for not at all (or for what the
    client was made with): then its stream goes on where it was, and nothing is raised.
    """

    prompt: Prompt
    model: str | None = None
    request_id: str | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stopping: StoppingOptions = field(default_factory=StoppingOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    constraint: Constraint | None = None
    adapter: Adapter | None = None
    resume_grace_s: float | None = None


class GenerationOptions(TypedDict, total=False):
    """The same in keywords: every field of the groups above under its own name."""

    model: str | None
    request_id: str | None
    constraint: Constraint | None
    adapter: Adapter | None
    resume_grace_s: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    n: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_string: bool
    logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool
    echo: bool
    min_chunk_tokens: int | None
    max_chunk_delay_s: float | None
    priority: int | None
    ttft_timeout_s: float | None
    total_timeout_s: float | None
    time_limit_s: float | None
    cache_salt: str | None
    session_id: str | None
    retention_level: int | None
    retention_s: float | None


def _strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """A lone stop string is one stop string, not its letters."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _pairs(bias: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[Any, ...]:
    return tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)


_GROUPS: Mapping[str, type[Any]] = {
    "sampling": SamplingOptions,
    "stopping": StoppingOptions,
    "output": OutputOptions,
    "scheduling": SchedulingOptions,
    "cache": CacheOptions,
}
_GROUP_OF: Mapping[str, str] = {
    option.name: name for name, group in _GROUPS.items() for option in fields(group)
}
_TOP_LEVEL = ("model", "request_id", "constraint", "adapter", "resume_grace_s")
_FREEZE: Mapping[str, Callable[[Any], tuple[Any, ...]]] = {
    "logit_bias": _pairs,
    "stop": _strings,
    "stop_token_ids": tuple,
}


def build_request(
    prompt: PromptLike | GenerationRequest, options: GenerationOptions
) -> GenerationRequest:
    """Sort flat options into their groups.

    Raises TypeError for an option that does not exist, and when a whole GenerationRequest comes
    with options besides, because it would not be clear which of the two counts.
    """
    if isinstance(prompt, GenerationRequest):
        if options:
            raise TypeError(f"options beside a GenerationRequest: {', '.join(sorted(options))}")
        return prompt
    top_level: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        frozen = _FREEZE[name](value) if name in _FREEZE else value
        if name in _TOP_LEVEL:
            top_level[name] = frozen
        elif name in _GROUP_OF:
            groups.setdefault(_GROUP_OF[name], {})[name] = frozen
        else:
            raise TypeError(_no_such_option(name))
    built = {name: _GROUPS[name](**values) for name, values in groups.items()}
    return GenerationRequest(prompt=as_prompt(prompt), **top_level, **built)


def with_grace(request: GenerationRequest, grace_s: float | None) -> GenerationRequest:
    """The request, kept for Resume for `grace_s` where it does not say for how long."""
    if grace_s is None or request.resume_grace_s is not None:
        return request
    return replace(request, resume_grace_s=grace_s)


def _no_such_option(name: str) -> str:
    nearest = get_close_matches(name, (*_TOP_LEVEL, *_GROUP_OF), n=1)
    return f"{name}: no such option" + "".join(f"; is it {one}?" for one in nearest)
