"""Random inputs that depend on the seed, the rank and a name: not on streams, order of creation or time."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from aorta.queues.workload import Context


def work_dtype(context: Context) -> torch.dtype:
    """bfloat16 at full size, as in training; float32 at the small one, which CPUs are quick at."""
    return torch.bfloat16 if context.size == "full" else torch.float32


class Inputs:
    """Makes tensors on the context's device. A reference can make any rank's inputs again."""

    def __init__(self, context: Context, dtype: torch.dtype | None = None) -> None:
        self._context = context
        self.dtype = dtype or work_dtype(context)

    def normal(self, name: str, shape: Sequence[int], std: float = 1.0, rank: int | None = None) -> Tensor:
        """Normally distributed around 0. rank None: the same on all ranks."""
        values = torch.empty(tuple(shape), dtype=self.dtype, device=self._context.device)
        return values.normal_(0.0, std, generator=self._generator(name, rank))

    def integers(self, name: str, shape: Sequence[int], end: int, rank: int | None = None) -> Tensor:
        """int64 in 0 … end−1."""
        device = self._context.device
        generator = self._generator(name, rank)
        return torch.randint(end, tuple(shape), generator=generator, device=device)

    def weight(self, name: str, num_in: int, num_out: int) -> Tensor:
        """[num_in, num_out], scaled so that a product with it keeps the variance."""
        return self.normal(name, (num_in, num_out), num_in**-0.5)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Zeros for results: memory from an earlier point of a sweep may hold the right ones already."""
        return torch.zeros(tuple(shape), dtype=self.dtype, device=self._context.device)

    def _generator(self, name: str, rank: int | None) -> torch.Generator:
        scope = "all ranks" if rank is None else f"rank {rank}"
        seed = zlib.crc32(f"{self._context.seed}, {scope}, {name}".encode())
        return torch.Generator(self._context.device).manual_seed(seed)
