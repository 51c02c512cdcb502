"""Refusals with the field names of the gateway's contract.

Owns the table from our field paths to a gateway's. A caller that sent `sampling_params.stop`
does not know `stopping.stop_strings`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.server.front.errors import FieldViolation, Refusal

PATHS: Final[Mapping[str, str]] = {
    "prompt": "input",
    "text_prompt.text": "text",
    "token_prompt.ids": "tokenized.input_ids",
    "sampling": "sampling_params",
    "stopping.max_tokens": "sampling_params.max_tokens",
    "stopping.min_tokens": "sampling_params.min_tokens",
    "stopping.stop_strings": "sampling_params.stop",
    "stopping.stop_token_ids": "sampling_params.stop_token_ids",
    "stopping.ignore_eos": "sampling_params.ignore_eos",
    "stopping.include_stop_string": "sampling_params.include_stop_str_in_output",
    "output.logprobs": "sampling_params.logprobs",
    "output.prompt_logprobs": "sampling_params.prompt_logprobs",
    "constraint.json_schema.schema": "sampling_params.json_schema",
    "constraint.regex.pattern": "sampling_params.regex",
    "constraint.grammar.ebnf": "sampling_params.grammar",
    "constraint": "sampling_params",
}
"""Our and the gateway's paths: prefixes, at a boundary between names, are replaced."""
_BIAS: Final = re.compile(r"sampling\.logit_bias\[(\d+)\]\.(token_id|bias)")
_ENTRY: Final = {"token_id": "key", "bias": "value"}
"""A list here, a map there. Its entries have keys and no places."""


def with_foreign_paths(refusal: Refusal, bias_ids: Sequence[int] = ()) -> Refusal:
    """The same refusal with the caller's field names.

    `bias_ids`: the token ids of our `logit_bias`, in its order.
    """
    violations = tuple(
        FieldViolation(
            path=foreign_path(violation.path, bias_ids), description=violation.description
        )
        for violation in refusal.violations
    )
    metadata = refusal.metadata
    if "field" in metadata:
        metadata = {**metadata, "field": foreign_path(metadata["field"], bias_ids)}
    return dataclasses.replace(refusal, violations=violations, metadata=metadata)


def foreign_path(path: str, bias_ids: Sequence[int] = ()) -> str:
    """The caller's name of one of our fields; one that is in no table stays as it is."""
    entry = _BIAS.fullmatch(path)
    if entry is not None and int(entry[1]) < len(bias_ids):
        return f"sampling_params.logit_bias[{bias_ids[int(entry[1])]}].{_ENTRY[entry[2]]}"
    ours = path
    while ours not in PATHS:
        cut = max(ours.rfind("."), ours.rfind("["))
        if cut < 0:
            return path
        ours = ours[:cut]
    return PATHS[ours] + path[len(ours) :]
