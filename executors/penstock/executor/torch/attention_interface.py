"""The attention function that the executor registers with transformers.

It rejects unknown arguments, because ignoring an attention argument would produce plausible but
wrong text. Each call is forwarded to the `AttentionRunner` attached to the calling module.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.paged_attention import Scoring

ATTENTION_NAME = "penstock_paged"
_RUNNER = "penstock_attention_runner"
_HARMLESS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that do not change the result of attention."""


class AttentionRunner(Protocol):
    """Computes a layer's attention. Shapes: T tokens, Hq query heads, H key and value heads, D head
    size.
    """

    def run_layer(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Compute the attention of the layer with index `layer`: query [T, Hq, D], key and value
        [T, H, D]; return [T, Hq, D].
        """
        ...


def attach_runner(model: nn.Module, runner: AttentionRunner) -> None:
    """Use `runner` for every attention module of this model, instead of an earlier runner."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, _RUNNER, runner)


def register_attention() -> None:
    """Register `ATTENTION_NAME` with transformers. Idempotent.

    Registers no mask function under this name, so that transformers creates no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(  # noqa: PLR0913 - transformers calls it so
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Implement transformers' attention function: query [1, Hq, T, D], key and value [1, H, T, D];
    return [1, T, Hq, D], and None for the attention weights. Raises UnsupportedModel for arguments
    or a module that the executor does not support.
    """
    name = type(module).__name__
    reject_unknown(name, others)
    if attention_mask is not None or dropout != 0.0:
        raise UnsupportedModel(f"{name} passes attention_mask or dropout")
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} attends in both directions")
    if softcap is None:
        # Some models keep the soft cap on the module and do not pass it.
        softcap = getattr(module, "attn_logit_softcapping", None)
    scoring = Scoring(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    runner: AttentionRunner | None = getattr(module, _RUNNER, None)
    layer = getattr(module, "layer_idx", None)
    if runner is None or not isinstance(layer, int):
        raise UnsupportedModel(f"{name} has no layer index")
    out = runner.run_layer(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scoring,
    )
    return out.unsqueeze(0), None


def reject_unknown(name: str, arguments: Mapping[str, object]) -> None:
    """Raise UnsupportedModel for an unknown argument that is not None, because it may change the
    result.
    """
    unknown = sorted(
        key for key, value in arguments.items() if key not in _HARMLESS and value is not None
    )
    if unknown:
        raise UnsupportedModel(f"{name} passes unknown attention arguments: {', '.join(unknown)}")
