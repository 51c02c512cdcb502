"""A `Package` whose classes only record their arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from penstock.executor.trtllm.package import Package

_SAMPLING = """end_id pad_id max_tokens bad bad_token_ids stop stop_token_ids
    include_stop_str_in_output embedding_bias logits_processor apply_batched_logits_processor n
    best_of use_beam_search top_k top_p top_p_min top_p_reset_ids top_p_decay seed temperature
    min_tokens beam_search_diversity_rate repetition_penalty presence_penalty frequency_penalty
    prompt_ignore_length length_penalty early_stopping no_repeat_ngram_size min_p beam_width_array
    logprobs prompt_logprobs return_context_logits return_generation_logits
    exclude_input_from_output return_encoder_output return_perf_metrics additional_model_outputs
    lookahead_config guided_decoding ignore_eos detokenize add_special_tokens
    truncate_prompt_tokens skip_special_tokens spaces_between_special_tokens"""
_GENERATE = """inputs sampling_params lora_request prompt_adapter_request streaming
    kv_cache_retention_config disaggregated_params trace_headers _postproc_params
    scheduling_params cache_salt"""
SAMPLING_FIELDS = frozenset(_SAMPLING.split())
GENERATE_ARGUMENTS = frozenset(_GENERATE.split())
"""Of release 1.2."""


@dataclass(eq=False)
class Made:
    """One object, and the arguments of its constructor."""

    kind: str
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments


class Recorder:
    """Stands for one class: accepts only the keywords `names`."""

    def __init__(self, kind: str, names: frozenset[str]) -> None:
        self.kind = kind
        self.made: list[Made] = []
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(names)]
        )

    def __call__(self, **arguments: Any) -> Made:
        self.__signature__.bind(**dict.fromkeys(self.__signature__.parameters) | arguments)
        self.made.append(Made(self.kind, arguments))
        return self.made[-1]


def recording_package(
    *,
    generate_arguments: frozenset[str] = GENERATE_ARGUMENTS,
    sampling_fields: frozenset[str] = SAMPLING_FIELDS,
    honours_penalties: bool = False,
    version: str = "1.2.0",
) -> Package:
    """Return a package of release 1.2, or of another with the given arguments and fields."""

    def recorder(kind: str, *names: str) -> Any:
        return Recorder(kind, frozenset(names))

    return Package(
        version=version,
        sampling_params=recorder("SamplingParams", *sampling_fields),
        request_error=RuntimeError,
        guided_decoding_params=recorder(
            "GuidedDecodingParams", "json", "regex", "grammar", "json_object", "structural_tag"
        ),
        lora_request=recorder(
            "LoRARequest", "lora_name", "lora_int_id", "lora_path", "lora_ckpt_source"
        ),
        retention_config=recorder(
            "KvCacheRetentionConfig",
            "token_range_retention_configs",
            "decode_retention_priority",
            "decode_duration_ms",
            "transfer_mode",
            "directory",
        ),
        token_range_retention_config=recorder(
            "TokenRangeRetentionConfig", "token_start", "token_end", "priority", "duration_ms"
        ),
        generate_arguments=generate_arguments,
        llm_arguments=frozenset(),
        build=recorder("LLM"),
        honours_penalties=honours_penalties,
    )
