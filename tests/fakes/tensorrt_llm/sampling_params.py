"""`SamplingParams` and `GuidedDecodingParams`, with the checks of the real ones."""

from typing import Any

from tensorrt_llm.recorded import recorded


def _check_guide(guide: Any) -> None:
    guides = (guide.json, guide.regex, guide.grammar, guide.json_object, guide.structural_tag)
    if sum(map(bool, guides)) > 1:
        raise ValueError("Only one guide can be used for a request")


def _check(params: Any) -> None:
    if params.pad_id is None:
        params.pad_id = params.end_id
    params.best_of = params.best_of or params.n
    if params.top_p is not None and not 0 <= params.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={params.top_p}")
    for name in ("top_k", "temperature"):
        if (getattr(params, name) or 0) < 0:
            raise ValueError(f"require {name} >= 0, got {name}={getattr(params, name)}")
    if params.best_of > 1 and is_greedy(params):
        raise ValueError(f"Greedy decoding with best_of={params.best_of} is not allowed")


GuidedDecodingParams = recorded("tensorrt_llm.llmapi.GuidedDecodingParams", _check_guide)
SamplingParams = recorded("tensorrt_llm.SamplingParams", _check)
"""`generate_async` changes it."""


def is_greedy(params: Any) -> bool:
    """Return whether decoding is greedy: temperature or top_p is 0, top_k is 1, or all three are
    unset.
    """
    chosen = (params.temperature, params.top_p, params.top_k)
    return chosen == (None, None, None) or 0 in chosen[:2] or params.top_k == 1
