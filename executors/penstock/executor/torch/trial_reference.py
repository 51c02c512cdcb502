"""Reference logits for the check of a fused step at load: the model's logits in float32.

Also defines the accepted differences. The structure is verified in float32 (`structure_check`), so
a fused step can differ only by rounding. The rounding error of the modules shows how much rounding
is normal for this model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.module_tree import DecoderTree
from penstock.executor.torch.structure_check import check_structure
from penstock.executor.torch.whole_sequence import module_logits, trial_tokens

_LEAST_ERROR = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_GREATEST_ERROR = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_TIMES_ROUNDING = 2.0
"""Limit of the relative error of logits: twice the modules' own error, at least _LEAST_ERROR and at
most _GREATEST_ERROR. On 35 test models in bfloat16, the error of the fused step on a CPU is 0.6 to
1.3 times the modules'.
"""
_MAX_SCALE_ERROR = 0.02
"""Limit of the relative error of the logits' norm.

Rounding has no systematic direction: with random weights it changes the norm by up to 0.002.
"""
_MAX_INT8_ERROR = 0.3
_TIMES_ROUNDING_IN_FP8 = 20.0
_MAX_FP8_ERROR = 1.0
_MAX_EIGHT_BIT_SCALE_ERROR = 0.05
"""Limits with weights or pages in 8 bits. Random weights amplify every rounding: with them, int8
gives errors of up to 0.13; fp8 gives 9 to 12 times the modules' error in bfloat16, up to 0.4.
Neither changes the norm by more than 0.005. Logits of another model have an error of 1.4.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialReference:
    """The reference logits of a model, and the errors that a fused step may have. `logits` float32
    [tokens, vocabulary]: the logits of `trial_tokens`. `rounding`: relative error of the modules'
    logits in `dtype`, the model's dtype.
    """

    logits: Tensor
    rounding: float
    dtype: torch.dtype

    def error_of(self, found: Tensor) -> float:
        """Return the relative error of logits `found` against the reference."""
        return float((found.float() - self.logits).norm() / self.logits.norm())

    def fault_of(self, found: Tensor, stored: torch.dtype) -> str:
        """Return why the logits `found` differ too much from the reference, or an empty string.

        `stored`: the narrowest dtype of the step's weights and pages.
        """
        if not bool(torch.isfinite(found).all()):
            return "its logits are not finite"
        error, bound = self.error_of(found), self._max_error(stored)
        if not error <= bound:
            return f"its logits differ from the model's in float32 by {error:.1e}, over {bound:.1e}"
        scale = float(found.float().norm() / self.logits.norm())
        is_narrow = stored is not self.dtype
        if not abs(scale - 1.0) <= (_MAX_EIGHT_BIT_SCALE_ERROR if is_narrow else _MAX_SCALE_ERROR):
            return f"its logits differ from the model's in float32 by a factor of {scale:.3g}"
        return ""

    def _max_error(self, stored: torch.dtype) -> float:
        if stored is self.dtype:
            bound = max(_TIMES_ROUNDING * self.rounding, _LEAST_ERROR[stored])
            return min(bound, _GREATEST_ERROR[stored])
        if stored is torch.int8:
            return _MAX_INT8_ERROR
        return min(max(_TIMES_ROUNDING_IN_FP8 * self.rounding, _MAX_INT8_ERROR), _MAX_FP8_ERROR)


@torch.inference_mode()
def make_reference(model: LoadedModel, tree: DecoderTree, num_tokens: int) -> TrialReference:
    """Return the reference for `num_tokens` trial tokens. Raises NotFused if the model does not
    match its module tree, or if too few of its embeddings are finite.
    """
    ids = trial_tokens(tree.embedding, num_tokens)
    exact = check_structure(model, tree, ids)
    rounding = float((module_logits(model, ids) - exact).norm() / exact.norm())
    return TrialReference(logits=exact, rounding=rounding, dtype=model.dtype)
