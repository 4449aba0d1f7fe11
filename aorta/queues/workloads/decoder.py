"""A small decoder with a key-value cache, and the same in float64 without tricks.

L layers, B sequences, S new tokens of each, P tokens in the cache before them, H heads, A head dim, D model
dim (H A), F hidden dim, V vocabulary. There are no position embeddings: order enters through the causal mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from aorta.queues.workloads.inputs_and_checks import Inputs

KERNELS_PER_LAYER = 13
EPS = 1e-6
KERNELS_OF_ENDS = 4
"""Embedding, last norm, logits, argmax."""


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    num_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class Layer:
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor


class Cache:
    """Keys and values of some sequences, [L, B, H, tokens, A] each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def past(self, num: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `num` tokens: views [L, B, H, P, A]."""
        return self.keys[:, :, :, :num], self.values[:, :, :, :num]

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()


class Decoder:
    """Weights, and what can be computed with them. Reading weights is all that calls share."""

    def __init__(self, inputs: Inputs, shape: DecoderShape) -> None:
        dim, ffn = shape.dim, 4 * shape.dim
        self.shape, self.inputs = shape, inputs
        self.embedding_VD = inputs.normal("embedding", (shape.vocab_size, dim))
        self.head_DV = inputs.weight("head", dim, shape.vocab_size)
        self.layers = [
            Layer(
                qkv=inputs.weight(f"qkv {index}", dim, 3 * dim),
                out=inputs.weight(f"out {index}", dim, dim),
                up=inputs.weight(f"up {index}", dim, ffn),
                down=inputs.weight(f"down {index}", ffn, dim),
            )
            for index in range(shape.num_layers)
        ]

    def cache(self, name: str, num_sequences: int, num_tokens: int, rank: int) -> Cache:
        """Filled with random numbers, as though a context had been read."""
        shape = (self.shape.num_layers, num_sequences, self.shape.num_heads, num_tokens, self.shape.head_dim)
        return Cache(
            self.inputs.normal(f"{name} keys", shape, rank=rank),
            self.inputs.normal(f"{name} values", shape, rank=rank),
        )

    def causal_mask(self, num_new: int, num_past: int) -> Tensor:
        """[S, P + S]: whether a new token sees a token. Made in setup, before streams part."""
        mask = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=self.embedding_VD.device)
        return mask.tril(num_past)

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, self.embedding_VD)

    def forward(self, x_BSD: Tensor, cache: Cache, num_past: int, mask: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] of the new tokens; their keys and values go into the cache behind the past.

        mask: causal_mask(S, P); None for a single new token, which sees all.
        """
        num_sequences, num_new, dim = x_BSD.shape
        end = num_past + num_new
        for index, layer in enumerate(self.layers):
            qkv = rms_norm(x_BSD, (dim,), eps=EPS) @ layer.qkv
            q, k, v = (self._heads(part) for part in qkv.chunk(3, dim=-1))
            cache.keys[index, :, :, num_past:end].copy_(k)
            cache.values[index, :, :, num_past:end].copy_(v)
            attended = scaled_dot_product_attention(
                q, cache.keys[index, :, :, :end], cache.values[index, :, :, :end], attn_mask=mask
            )
            x_BSD = x_BSD + attended.transpose(1, 2).reshape(num_sequences, num_new, dim) @ layer.out
            x_BSD = x_BSD + (rms_norm(x_BSD, (dim,), eps=EPS) @ layer.up).relu_() @ layer.down
        return rms_norm(x_BSD, (dim,), eps=EPS) @ self.head_DV

    def _heads(self, rows_BSD: Tensor) -> Tensor:
        split = rows_BSD.view(*rows_BSD.shape[:-1], self.shape.num_heads, self.shape.head_dim)
        return split.transpose(1, 2)

    def reference(self, x_BSD: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Logits in float64, all new tokens at once and attention written out; writes nothing."""
        x = x_BSD.double()
        num_new = x.shape[1]
        for index, layer in enumerate(self.layers):
            q, k, v = (self._heads(part) for part in (_normed(x) @ layer.qkv.double()).chunk(3, dim=-1))
            num_past = 0
            if past is not None:
                num_past = past[0].shape[-2]
                k = torch.cat([past[0][index].double(), k], dim=-2)
                v = torch.cat([past[1][index].double(), v], dim=-2)
            scores = q @ k.transpose(-1, -2) / self.shape.head_dim**0.5
            position = torch.arange(num_past + num_new, device=x.device)
            hidden = position[None, :] > num_past + torch.arange(num_new, device=x.device)[:, None]
            attended = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
            x = x + attended.transpose(1, 2).flatten(2) @ layer.out.double()
            x = x + (_normed(x) @ layer.up.double()).relu() @ layer.down.double()
        return _normed(x) @ self.head_DV.double()


def _normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


def tokens_of(logits: Tensor) -> Tensor:
    """The most likely token of each position (greedy decoding)."""
    return logits.argmax(dim=-1)


def num_kernels(num_calls: int, num_layers: int) -> int:
    """Kernels of that many forwards through that many layers each."""
    return num_calls * (num_layers * KERNELS_PER_LAYER + KERNELS_OF_ENDS)
