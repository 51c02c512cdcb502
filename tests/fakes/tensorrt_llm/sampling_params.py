"""`SamplingParams` and `GuidedDecodingParams`: fields, checks, and the changes made to them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """At most one guide."""

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        num_guides = sum(
            map(bool, (self.json, self.regex, self.grammar, self.json_object, self.structural_tag))
        )
        if num_guides > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {num_guides}.")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """If temperature, top_p and top_k are unset, decoding is greedy. `generate_async`
    changes it."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32  # declared int, accepts None
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None
    _context_logits_auto_enabled: bool = False
    _generation_logits_auto_enabled: bool = False
    _return_log_probs: bool = False
    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    _stop_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    _bad_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    _stream_interval: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        self.logprobs = None if self.logprobs is None else int(self.logprobs)
        self.prompt_logprobs = None if self.prompt_logprobs is None else int(self.prompt_logprobs)
        self._validate()

    def _validate(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if (
            (self.best_of or 1) > 1
            and self._greedy_decoding
            and not os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING")
        ):
            raise ValueError(f"Greedy decoding with best_of={self.best_of} is not allowed")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError("truncate_prompt_tokens must be >= 1")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    @property
    def _greedy_decoding(self) -> bool:
        return not self.use_beam_search and (
            (self.temperature is None and self.top_p is None and self.top_k is None)
            or self.top_k == 1
            or self.top_p == 0
            or self.temperature == 0
        )

    def _setup(self, tokenizer: Any) -> None:
        """Set end and padding ids from the tokenizer, and convert stop and bad words to tokens."""
        if self.end_id is None:
            self.end_id = tokenizer.eos_token_id
        if self.pad_id is None:
            self.pad_id = self.end_id
        self._bad_word_ids = [tokenizer.encode(word) for word in _listed(self.bad)] or None
        self._stop_word_ids = [tokenizer.encode(word) for word in _listed(self.stop)] or None

    def _get_stop_reasons_and_words(self) -> list[tuple[int | str, list[int]]]:
        """Return every stop word with its reported reason."""
        strings = _listed(self.stop)
        if strings and self._stop_word_ids is None:
            raise RuntimeError(
                f"SamplingParams.stop ({self.stop}) is not processed by tokenizer, please call the "
                "setup method."
            )
        tokens = [(token, [token]) for token in self.stop_token_ids or []]
        return [*tokens, *zip(strings, self._stop_word_ids or [], strict=True)]


def _listed(words: str | list[str] | None) -> list[str]:
    return [words] if isinstance(words, str) else list(words or [])
