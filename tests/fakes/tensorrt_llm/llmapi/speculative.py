"""The configuration classes of speculative decoding; the engine uses `max_draft_len` only.

Fields as in the text of 1.2's release candidates; later ones call the draft model
`speculative_model`.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from tensorrt_llm.llmapi.strict_model import StrictModel, ValidationError


class DecodingBaseConfig(StrictModel):
    """The common fields of all classes."""

    is_for_pytorch: ClassVar[bool] = True

    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model_dir: str | Path | None = None
    max_concurrency: int | None = None
    load_format: str | None = None
    acceptance_window: int | None = None
    acceptance_length_threshold: float | None = None

    def supports_backend(self, backend: str) -> bool:
        """Return whether the backend supports it; some exist only for the TensorRT backend."""
        return self.is_for_pytorch or backend not in ("pytorch", "_autodeploy")

    def validate(self) -> None:
        """Raise ValueError for missing fields; called when the engine is built."""


class EagleDecodingConfig(DecodingBaseConfig):
    """A draft head trained for the model."""

    eagle_choices: list[list[int]] | None = None
    greedy_sampling: bool | None = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: int | None = None  # noqa: N815
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: set[int] | None = None

    def __post_init__(self) -> None:
        if self.max_draft_len is None:
            raise ValidationError("max_draft_len is required for Eagle")

    def validate(self) -> None:
        if self.speculative_model_dir is None:
            raise ValueError("Draft model must be provided for EAGLE")


class MTPDecodingConfig(DecodingBaseConfig):
    """The model's own heads for later tokens."""

    num_nextn_predict_layers: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    num_nextn_predict_layers_from_model_config: int = 1

    def __post_init__(self) -> None:
        self.max_draft_len = self.num_nextn_predict_layers


class NGramDecodingConfig(DecodingBaseConfig):
    """Drafts from n-grams of earlier tokens. The default never finds a match."""

    max_matching_ngram_size: int = 0
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


class DraftTargetDecodingConfig(DecodingBaseConfig):
    """A small model that drafts for the large one."""


class MedusaDecodingConfig(DecodingBaseConfig):
    """Medusa heads: not on PyTorch."""

    is_for_pytorch = False

    medusa_choices: list[list[int]] | None = None
    num_medusa_heads: int | None = None


class LookaheadDecodingConfig(DecodingBaseConfig):
    """Jacobi iteration over a window: not on PyTorch. The defaults are C++'s, from memory."""

    is_for_pytorch = False

    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """The caller's drafter."""

    drafter: Any
    resource_manager: Any = None


class AutoDecodingConfig(DecodingBaseConfig):
    """The package chooses."""


class SaveHiddenStatesDecodingConfig(DecodingBaseConfig):
    """Writes hidden states, drafts nothing."""

    output_directory: str
    write_interval: int = 20
    file_prefix: str = "data"
    eagle3_layers_to_capture: set[int] | None = field(default=None)
