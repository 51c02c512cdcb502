"""The options of a generation: the option groups of the API as immutable values.

Defines the groups, `GenerationRequest`, and the keyword arguments for the fields of both. Unless
described otherwise, None means "not set": the server's default applies. The server checks ranges;
`get_model` returns its limits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeAlias, TypedDict

from penstock.client.prompt import Prompt, PromptLike, as_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is sampled.

    Attributes:
        temperature: 0 to 2; 0 chooses the most likely token. Default 1.
        top_k: Sample from the k most likely tokens. Default: all.
        top_p: Sample from the smallest set of most likely tokens whose total probability reaches
            this, above 0 to 1. Default 1.
        min_p: Drop tokens whose probability is below this fraction of the highest one, 0 to 1.
            Default 0.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the prompt
            or the output, above 0 to 2. Default 1.
        presence_penalty: Subtracted once from the logits of tokens in the output, -2 to 2. Default
            0.
        frequency_penalty: Subtracted from the logit of a token for each occurrence in the output,
            -2 to 2. Default 0.
        logit_bias: Pairs of a token id and the value added to its logit.
        seed: Makes the output reproducible, 0 to 2**64 - 1. Default: drawn by the server, see
            `Accepted.seed`.
        n: Independent outputs of one prompt. Default 1.
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
    """When an output ends.

    Attributes:
        max_tokens: Maximum number of tokens of each output. Default:
            `ModelLimits.default_max_tokens`, or the rest of the context if that is smaller.
        min_tokens: Minimum number of tokens of each output. Default 0.
        stop: The output ends where one of these strings first appears.
        stop_token_ids: The output ends at the first of these tokens.
        ignore_eos: Continue after the model's end-of-sequence token.
        include_stop_string: Deliver the stop string as part of the text.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The content of the stream, and how it is split into messages.

    Attributes:
        logprobs: Log-probabilities of output tokens: 0 for only the sampled token, k for the k
            most likely tokens as well. Default: none.
        prompt_logprobs: The same for the tokens of the prompt, in `PromptEcho`. Default: none.
        return_token_ids: Deliver token ids in `Tokens.records`.
        echo: Deliver the prompt in `PromptEcho` first.
        min_chunk_tokens: Hold back output until a message has this many tokens. Default 1.
        max_chunk_delay_s: Send a message with fewer tokens after this time, 0 to 10 s. Default
            0.1 s.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    echo: bool = False
    min_chunk_tokens: int | None = None
    max_chunk_delay_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """The priority of a request, and how long it may take, in seconds from its arrival at the
    server.

    Attributes:
        priority: -100 to 100; higher is more urgent. Default 0.
        ttft_timeout_s: The request fails with `DeadlineExceeded` if the server has not generated
            its first token within this time.
        total_timeout_s: The request fails with `DeadlineExceeded` if it has not ended within this
            time. Default: the call's `deadline_s`, or otherwise `ModelLimits.default_timeout_s`.
        time_limit_s: Outputs end after this time without an error, with the text so far.
    """

    priority: int | None = None
    ttft_timeout_s: float | None = None
    total_timeout_s: float | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How KV cache blocks are shared and kept.

    Attributes:
        cache_salt: Share cached blocks only with requests of the same tenant that have the same
            salt, 1 to 128 characters.
        session_id: The conversation that this request continues. Its KV cache blocks are kept for
            its next request. 1 to 128 characters.
        retention_level: 0 to 100; a higher level keeps the blocks longer. Default 35.
        retention_s: How long the level applies after the request ends. Default: no limit, or the
            server's maximum.
    """

    cache_salt: str | None = None
    session_id: str | None = None
    retention_level: int | None = None
    retention_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchemaConstraint:
    """The output is a JSON document that conforms to a schema.

    Attributes:
        schema: The JSON schema as JSON text; "{}" allows any document.
    """

    schema: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexConstraint:
    """The whole output matches a regular expression.

    Attributes:
        pattern: The expression.
    """

    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConstraint:
    """The output conforms to a grammar.

    Attributes:
        ebnf: The grammar in GBNF; its start symbol is `root`.
    """

    ebnf: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConstraint:
    """The output is exactly one of several texts.

    Attributes:
        choices: The texts.
    """

    choices: tuple[str, ...]


Constraint: TypeAlias = (
    JsonSchemaConstraint | RegexConstraint | GrammarConstraint | ChoiceConstraint
)
"""The format that the output must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The LoRA adapter that a request uses.

    Attributes:
        name: A name in `Model.adapters`.
        scale: Factor by which it is scaled, -4 to 4. Default 1.
    """

    name: str
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation with its options in groups, instead of keywords.

    Attributes:
        prompt: The prompt.
        model: Name of the model; None: the server's default.
        request_id: An id for cancelling and resuming. A request with the id of a live request
            fails with `RequestIdInUse`. None: the server assigns an id.
        sampling: How the next token is sampled.
        stopping: When an output ends.
        output: The content of the stream.
        scheduling: Priority and timeouts.
        cache: Sharing and retention of the KV cache.
        constraint: The format that the output must have.
        adapter: A LoRA adapter.
        resume_timeout_s: Seconds for which the server keeps the request after its connection is
            lost; the stream then continues on a new connection. None: the client's setting.
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
    resume_timeout_s: float | None = None


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of a call: the fields of `GenerationRequest` and of its groups, except
    `prompt`.

    For their meaning see `SamplingOptions`, `StoppingOptions`, `OutputOptions`, `SchedulingOptions`
    and `CacheOptions`. `stop` may be one string, and `logit_bias` a mapping. None has the same
    effect as no argument. An unknown argument raises TypeError.
    """

    model: str | None
    request_id: str | None
    constraint: Constraint | None
    adapter: Adapter | None
    resume_timeout_s: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None
    seed: int | None
    n: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
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
    """Return the stop strings; a str is one stop string."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _pairs(bias: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[Any, ...]:
    return tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)


GROUPS: Mapping[str, type[Any]] = {
    "sampling": SamplingOptions,
    "stopping": StoppingOptions,
    "output": OutputOptions,
    "scheduling": SchedulingOptions,
    "cache": CacheOptions,
}
_GROUP_OF: Mapping[str, str] = {
    option.name: name for name, group in GROUPS.items() for option in fields(group)
}
_TOP_LEVEL = ("model", "request_id", "constraint", "adapter", "resume_timeout_s")
_KEYWORD_OF_FIELD: Mapping[str, str] = {
    "num_outputs": "n",
    "stop_strings": "stop",
    "salt": "cache_salt",
}
"""Keyword arguments by the name of their protobuf field, where the two differ. Suggested when a
caller uses the field's name."""
_FREEZE: Mapping[str, Callable[[Any], tuple[Any, ...]]] = {
    "logit_bias": _pairs,
    "stop": _strings,
    "stop_token_ids": tuple,
}


def _frozen(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return _FREEZE[name](value)
    except TypeError:
        raise TypeError(f"{name}: must be a list, not {type(value).__name__}") from None


def build_request(
    prompt: PromptLike | GenerationRequest, options: GenerationOptions
) -> GenerationRequest:
    """Build the request from a prompt and options that are given as keywords; return a
    GenerationRequest unchanged.

    Raises TypeError for an option that does not exist, for an option that must be a list and is
    not, and for a GenerationRequest together with options. Raises the errors of `as_prompt`.
    """
    if isinstance(prompt, GenerationRequest):
        if options:
            raise TypeError(f"options with a GenerationRequest: {', '.join(sorted(options))}")
        return prompt
    top_level: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name in _TOP_LEVEL:
            top_level[name] = value
        elif name not in _GROUP_OF:
            raise TypeError(_no_such_option(name))
        elif value is not None:
            frozen = _frozen(name, value) if name in _FREEZE else value
            groups.setdefault(_GROUP_OF[name], {})[name] = frozen
    built = {name: GROUPS[name](**values) for name, values in groups.items()}
    return GenerationRequest(prompt=as_prompt(prompt), **top_level, **built)


def with_resume_timeout(
    request: GenerationRequest, resume_timeout_s: float | None
) -> GenerationRequest:
    """Return the request with `resume_timeout_s`, unless the request already sets it or the
    argument is None."""
    if resume_timeout_s is None or request.resume_timeout_s is not None:
        return request
    return replace(request, resume_timeout_s=resume_timeout_s)


def _no_such_option(name: str) -> str:
    nearest = get_close_matches(name, (*_TOP_LEVEL, *_GROUP_OF, *_KEYWORD_OF_FIELD), n=1)
    hints = (f"; did you mean {_KEYWORD_OF_FIELD.get(one, one)}?" for one in nearest)
    return f"{name}: no such option" + "".join(hints)
