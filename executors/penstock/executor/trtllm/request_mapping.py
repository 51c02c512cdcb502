"""Converts a request to the arguments of `LLM.generate_async`.

docs/tensorrt-llm-mapping.md documents the rules, and a test compares it with this module. The only
state that changes is a counter: it makes the cache salts of requests that must not share cached
blocks unique.
"""

import inspect
import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.executor.trtllm.api import (
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LoRARequest,
    SamplingParams,
)
from penstock.executor.trtllm.config import TrtllmConfig
from penstock.executor.trtllm.constraint_check import guide_text
from penstock.executor.trtllm.package import Package
from penstock.executor.trtllm.samplers import offered_features
from penstock.scheduler.executor import Feature
from penstock.scheduler.request import CacheRetention, Constraint, ConstraintKind, RequestSpec

_NO_END_ID: Final = -1
_FULL_TOP_P: Final = 0.9999
_MAX_RETENTION_S: Final = 10 * 365 * 86_400.0
"""A longer duration is treated as unlimited, because it could overflow the engine's clock (64-bit
nanoseconds).
"""
_GUIDES: Final = {
    ConstraintKind.JSON_SCHEMA: (Feature.JSON_SCHEMA, "json"),
    ConstraintKind.REGEX: (Feature.REGEX, "regex"),
    ConstraintKind.GRAMMAR: (Feature.GRAMMAR, "grammar"),
    ConstraintKind.CHOICE: (Feature.CHOICE, "regex"),
}
"""Constraint kind -> required feature, and field of GuidedDecodingParams."""


class NotResumable(ValueError):
    """The request is valid, but the engine cannot continue its constraint, because it has output
    already.
    """


class RequestMapping:
    """Converts the requests for one engine to arguments of `generate_async`.

    Every call creates new objects, because the engine modifies them; only the objects of the LoRA
    adapters are reused. The constructor raises ValueError if the installed version lacks an
    argument that `config` requires, or a LoRA folder is missing.
    """

    def __init__(self, config: TrtllmConfig, package: Package, vocab_size: int) -> None:
        self._package = package
        self._vocab_size = vocab_size
        self._features = offered_features(config, package)
        self._sampling_arguments = frozenset(inspect.signature(package.sampling_params).parameters)
        self._unique_numbers: Iterator[int] = itertools.count()
        _check_arguments(config, package)
        self._adapters: dict[str, LoRARequest] = {
            adapter.name: package.lora_request(
                lora_name=adapter.name, lora_int_id=adapter.id, lora_path=str(adapter.path)
            )
            for adapter in config.lora_config.adapters
        }

    def arguments(self, spec: RequestSpec, tokens: NDArray[np.int32]) -> dict[str, Any]:
        """Return the keyword arguments for `generate_async`.

        `tokens` int32 [n]: all tokens of the request: its prompt and any output from before a
        preemption or a replay. Raises ValueError naming a field that the engine would reject or
        ignore; NotResumable for a constrained request with output.
        """
        self._check_tokens(tokens)
        # Earlier output is part of the prompt for the engine.
        num_generated = len(tokens) - spec.num_original_prompt_tokens
        arguments: dict[str, Any] = {
            "inputs": tokens.tolist(),
            "sampling_params": self._sampling_params(spec, num_generated),
            "streaming": True,
        }
        if "cache_salt" in self._package.generate_arguments:
            arguments["cache_salt"] = self._cache_salt(spec)
        if spec.adapter:
            arguments["lora_request"] = self._lora_request(spec.adapter)
        if spec.retention is not None:
            arguments["kv_cache_retention_config"] = self._retention(spec.retention)
        if "priority" in self._package.generate_arguments:
            # Our priorities are -100 .. 100, the engine's 0 .. 1; in both, a greater one is more
            # urgent.
            arguments["priority"] = (spec.priority + 100) / 200
        return arguments

    def _check_tokens(self, tokens: NDArray[np.int32]) -> None:
        """Raise ValueError for an empty list or a token id outside the vocabulary, because an
        assertion in the engine would fail.
        """
        if not len(tokens):
            raise ValueError("prompt_ids: must have at least one token")
        foreign = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if len(foreign):
            raise ValueError(
                f"prompt_ids[{foreign[0]}]: must be in 0 .. {self._vocab_size - 1},"
                f" not {tokens[foreign[0]]}"
            )

    def _sampling_params(self, spec: RequestSpec, num_generated: int) -> SamplingParams:
        max_tokens = spec.max_tokens - num_generated
        if max_tokens < 1:
            # A request without tokens to generate ended the engine (NVIDIA issue #7692).
            raise ValueError("max_tokens: must leave at least one token to generate")
        min_tokens = max(0, spec.num_stop_banned_tokens - num_generated)
        if min_tokens:
            self._require(Feature.MIN_TOKENS, "min_tokens")
        options: dict[str, Any] = {
            "n": 1,
            # The engine lowers a max_tokens that does not fit instead of rejecting the request;
            # admission has checked that this one fits.
            "max_tokens": max_tokens,
            "seed": spec.sampling.seed,
            # The front (gRPC server process) converts tokens to text, where it searches for stop
            # strings. With detokenisation, the engine would do so too, but continue after a match.
            "detokenize": False,
            "add_special_tokens": False,
        }
        options |= self._sampling_options(spec)
        options |= self._penalties(spec)
        options |= _stops(spec.stop_ids, is_banned=min_tokens > 0)
        if min_tokens:
            options["min_tokens"] = min_tokens
        if spec.sampling.logit_bias:
            options["embedding_bias"] = self._embedding_bias(spec.sampling.logit_bias)
        options |= self._logprobs(spec)
        if spec.constraint is not None:
            _check_constrained(spec, num_generated, min_tokens)
            options["guided_decoding"] = self._guide(spec.constraint)
        params: SamplingParams = self._package.sampling_params(**options)
        return params

    def _sampling_options(self, spec: RequestSpec) -> dict[str, Any]:
        """Return temperature, top-p and top-k, and min-p if it is positive. The first three are
        always set, because the engine decodes greedily without them.
        """
        sampling = spec.sampling
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": self._top_p(sampling.top_p),
        }
        if sampling.min_p > 0:
            self._require(Feature.MIN_P, "sampling.min_p")
            options["min_p"] = sampling.min_p
        return options

    def _top_p(self, top_p: float) -> float:
        """Return top-p; for releases after 1.2, values of 0.9999 or more are rounded up to 1.

        With such values, these releases may sample token ids beyond the vocabulary (NVIDIA issue
        #19485).
        """
        return 1.0 if self._package.is_later and top_p >= _FULL_TOP_P else top_p

    def _penalties(self, spec: RequestSpec) -> dict[str, Any]:
        sampling = spec.sampling
        neutral = (
            ("repetition_penalty", sampling.repetition_penalty, 1.0),
            ("presence_penalty", sampling.presence_penalty, 0.0),
            ("frequency_penalty", sampling.frequency_penalty, 0.0),
        )
        options: dict[str, Any] = {name: value for name, value, off in neutral if value != off}
        for name in options:
            self._require(Feature.PENALTIES, f"sampling.{name}")
        # The engine counts the prompt's tokens for presence and frequency unless it gets the start
        # of the output (NVIDIA PR #8127).
        if options.keys() - {"repetition_penalty"}:
            name = "prompt_ignore_length"
            if name in self._sampling_arguments:
                options[name] = spec.num_original_prompt_tokens
        return options

    def _logprobs(self, spec: RequestSpec) -> dict[str, Any]:
        if spec.sampling.num_prompt_logprobs >= 0:
            self._require(Feature.PROMPT_LOGPROBS, "sampling.num_prompt_logprobs")
        if spec.sampling.num_logprobs < 0:
            return {}
        self._require(Feature.LOGPROBS, "sampling.num_logprobs")
        # 0 disables logprobs in release 1.2; the chosen token is included with any number.
        return {"logprobs": max(1, spec.sampling.num_logprobs)}

    def _embedding_bias(self, biases: tuple[tuple[int, float], ...]) -> Any:
        """Return a torch tensor, float32 [vocab_size]: the only form of a logit bias that the
        engine supports. Raises ValueError for a token id outside the vocabulary.
        """
        self._require(Feature.LOGIT_BIAS, "sampling.logit_bias")
        # Imported here because requests without bias do not need torch.
        import torch

        dense = np.zeros(self._vocab_size, dtype=np.float32)
        for token_id, bias in biases:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"sampling.logit_bias: token id must be in 0 .. {self._vocab_size - 1},"
                    f" not {token_id}"
                )
            dense[token_id] = bias
        return torch.from_numpy(dense)  # pyright: ignore[reportUnknownMemberType]

    def _guide(self, constraint: Constraint) -> GuidedDecodingParams:
        feature, field = _GUIDES[constraint.kind]
        self._require(feature, "constraint")
        if any("\0" in text for text in constraint.texts):
            # xgrammar reads a C string, and would enforce only the part before this character.
            raise ValueError("constraint: must not contain the character U+0000")
        guide: GuidedDecodingParams = self._package.guided_decoding_params(
            **{field: guide_text(constraint)}
        )
        return guide

    def _cache_salt(self, spec: RequestSpec) -> str:
        """Return the cache salt: only requests with the same salt share cached blocks. A request
        without `hash_salt` gets a unique cache salt that cannot equal the hexadecimal text of a
        `hash_salt`.
        """
        if spec.hash_salt:
            return spec.hash_salt.hex()
        return f"alone-{spec.key}-{next(self._unique_numbers)}"

    def _lora_request(self, name: str) -> LoRARequest:
        if name not in self._adapters:
            raise ValueError(
                f"adapter: {name!r} is not one of {', '.join(self._adapters) or 'none'}"
            )
        return self._adapters[name]

    def _retention(self, retention: CacheRetention) -> KvCacheRetentionConfig:
        self._require(Feature.CACHE_RETENTION, "retention")
        is_endless = retention.duration_s > _MAX_RETENTION_S
        duration = None if is_endless else timedelta(seconds=retention.duration_s)
        prompt = self._package.token_range_retention_config(
            token_start=0, token_end=None, priority=retention.level, duration_ms=duration
        )
        config: KvCacheRetentionConfig = self._package.retention_config(
            token_range_retention_configs=[prompt],
            decode_retention_priority=retention.level,
            decode_duration_ms=duration,
        )
        return config

    def _require(self, feature: Feature, field: str) -> None:
        if feature not in self._features:
            raise ValueError(f"{field}: {feature.value} is not offered by this engine")


def _check_arguments(config: TrtllmConfig, package: Package) -> None:
    """Raise ValueError if `generate_async` lacks an argument that every request needs, that
    `config` requires, or that keeps tenants from sharing cached prompts.

    Release 1.2 has all of them; a later release may not.
    """
    needed = {"inputs", "sampling_params", "streaming"}
    if config.kv_cache_config.enable_block_reuse:
        # Without a salt, tenants would share cached prompts.
        needed |= {"cache_salt", "kv_cache_retention_config"}
    if config.lora_config.adapters:
        needed.add("lora_request")
    missing = sorted(needed - package.generate_arguments)
    if missing:
        hint = ""
        if "cache_salt" in missing:
            hint = "; without cache_salt, kv_cache_config.enable_block_reuse must be off"
        raise ValueError(
            f"LLM.generate_async of TensorRT-LLM {package.version} takes no"
            f" {', '.join(missing)}{hint}"
        )


def _stops(stop_ids: tuple[int, ...], *, is_banned: bool) -> dict[str, Any]:
    """Return the arguments that end the output, by token ids only.

    `end_id` is always set, because the engine would otherwise need a tokenizer. It is the last stop
    id, because the front appends the model's end-of-sequence ids to the request's stop ids.

    While stop ids are banned by `min_tokens` (`is_banned`), the engine gets only `end_id`: it does
    not stop at `end_id` before `min_tokens`, but would stop too early at the other stop ids. The
    scheduler also checks every token, and ends the request at any stop id after `min_tokens`.
    """
    options: dict[str, Any] = {
        "end_id": stop_ids[-1] if stop_ids else _NO_END_ID,
        "pad_id": stop_ids[-1] if stop_ids else 0,
        "ignore_eos": not stop_ids,
        # Otherwise the last result lacks tokens that were delivered before.
        "include_stop_str_in_output": True,
    }
    if len(stop_ids) > 1 and not is_banned:
        options["stop_token_ids"] = list(stop_ids[:-1])
    return options


def _check_constrained(spec: RequestSpec, num_generated: int, min_tokens: int) -> None:
    """Raise NotResumable or ValueError for a constrained request that the engine would handle
    wrongly: with earlier output, without stop ids, or with `min_tokens`.
    """
    if num_generated:
        raise NotResumable(
            f"constraint: the engine would restart the constraint after {num_generated} tokens"
        )
    if not spec.stop_ids:
        raise ValueError("stop_ids: a constrained output ends with an end-of-sequence token")
    if min_tokens:
        # After a complete constraint only the end token is allowed, which min_tokens would bar.
        raise ValueError("min_tokens: cannot be combined with a constraint")
