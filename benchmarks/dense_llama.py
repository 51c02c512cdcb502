"""Computes a Llama in plain PyTorch with a dense cache: a lower bound for PyTorch's operators.

Contains only the arithmetic, without paging, modules, scheduling or in-flight batching.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm_1: Tensor
    norm_2: Tensor


class DenseLlama:
    """A Llama with the weights of a `transformers` model without grouped-query attention;
    projections with the same input are fused.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self._num_heads: int = config.num_attention_heads
        self._head_dim: int = config.head_dim
        self._eps: float = config.rms_norm_eps
        self._embedding: Tensor = model.model.embed_tokens.weight.detach()
        self._norm: Tensor = model.model.norm.weight.detach()
        self._head: Tensor = model.lm_head.weight.detach()
        self._layers = [self._fused(layer) for layer in model.model.layers]
        theta = config.rope_parameters["rope_theta"]
        steps = torch.arange(0, self._head_dim, 2) / self._head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings), theta**-steps)
        angles = torch.cat([angles, angles], -1)
        dtype = self._embedding.dtype
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def _fused(layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return _Layer(
            qkv=torch.cat([part.weight.detach() for part in projections]),
            out=attention.o_proj.weight.detach(),
            gate_up=torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
            down=mlp.down_proj.weight.detach(),
            norm_1=layer.input_layernorm.weight.detach(),
            norm_2=layer.post_attention_layernorm.weight.detach(),
        )

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        """Generate greedily: prefill the prompts one by one, then decode all sequences as one
        batch. Returns `num_new` tokens for each prompt.
        """
        num_rows, longest = len(prompts), max(map(len, prompts)) + num_new
        shape = (len(self._layers), 2, num_rows, self._num_heads, longest, self._head_dim)
        cache = torch.zeros(shape, dtype=self._embedding.dtype)
        tokens = torch.cat(
            [self._prefill(prompt, cache[:, :, row]) for row, prompt in enumerate(prompts)]
        )
        outputs = [tokens]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        for _ in range(num_new - 1):
            tokens = self._decode(tokens, lengths, cache)
            outputs.append(tokens)
            lengths = lengths + 1
        table: list[list[int]] = torch.stack(outputs, 1).tolist()
        return table

    def _prefill(self, prompt: list[int], cache: Tensor) -> Tensor:
        """Compute a prompt into `cache` [layers, 2, heads, longest, dim]; return the next token
        [1]."""
        num_tokens = len(prompt)
        hidden = self._embedding[torch.tensor(prompt)]
        positions = torch.arange(num_tokens)
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(hidden, layer, positions)
            cache[index, 0, :, :num_tokens] = key.transpose(0, 1)
            cache[index, 1, :, :num_tokens] = value.transpose(0, 1)
            attended = functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                is_causal=True,
            )
            hidden = self._finish_layer(hidden, attended[0].transpose(0, 1), layer)
        return self._next(hidden[-1:])

    def _decode(self, tokens: Tensor, lengths: Tensor, cache: Tensor) -> Tensor:
        """Decode one token for every row: `tokens` and `lengths` [rows]; `cache` [layers, 2, rows,
        heads, longest, dim]. Returns the next tokens [rows].
        """
        # Use the whole cache, even for short rows: products of a slice are far slower.
        rows = torch.arange(len(tokens))
        unseen = torch.arange(cache.shape[4])[None] > lengths[:, None]
        mask = torch.zeros(unseen.shape, dtype=cache.dtype).masked_fill_(unseen, float("-inf"))
        mask = mask.repeat_interleave(self._num_heads, 0).unsqueeze(1)
        hidden = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(hidden, layer, lengths)
            cache[index, 0, rows, :, lengths] = key
            cache[index, 1, rows, :, lengths] = value
            # One query per row: here batched products are faster than fused attention.
            keys, values = cache[index].flatten(1, 2)
            scores = torch.baddbmm(
                mask,
                query.reshape(len(keys), 1, self._head_dim),
                keys.transpose(1, 2),
                alpha=self._head_dim**-0.5,
            )
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
            attended = torch.bmm(weights, values).view(query.shape)
            hidden = self._finish_layer(hidden, attended, layer)
        return self._next(hidden)

    def _project(
        self, hidden: Tensor, layer: _Layer, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = functional.rms_norm(hidden, hidden.shape[-1:], layer.norm_1, self._eps)
        parts = functional.linear(normed, layer.qkv).view(-1, 3, self._num_heads, self._head_dim)
        query, key, value = parts.unbind(1)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def _finish_layer(self, hidden: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        hidden = hidden + functional.linear(attended.reshape(len(hidden), -1), layer.out)
        normed = functional.rms_norm(hidden, hidden.shape[-1:], layer.norm_2, self._eps)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
        return hidden + functional.linear(functional.silu(gate) * up, layer.down)

    def _next(self, hidden: Tensor) -> Tensor:
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._norm, self._eps)
        return functional.linear(normed, self._head).max(-1).indices


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
