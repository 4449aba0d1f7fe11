"""Inputs of a workload that any rank can make again, the check of its results, and its stated work.

Inputs depend on the seed, the rank and a name: not on streams, order of creation or time.
"""

import zlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from aorta.account.results.schema import Checked
from aorta.queues.workload import ALONE, Context, DeviceWork, Piece, Workload


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


@dataclass(frozen=True)
class TensorComparison:
    """The largest error may be `tolerance` times the largest magnitude of the reference."""

    name: str
    actual: Tensor
    reference: Tensor
    tolerance: float


def tolerance_of(dtype: torch.dtype) -> float:
    """Tolerance of a few layers in this type against float64: far above what rounding makes of random
    numbers, far below the numbers."""
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 6e-2)


class CheckedWorkload(Workload):
    """A workload that says what to compare; this does it."""

    outputs: dict[str, Tensor]
    """Everything that comparisons() reads as what the iterations left behind: overwrite a number in one and
    validate_correctness fails."""

    @abstractmethod
    def comparisons(self) -> Iterable[TensorComparison]:
        """One after the other, so that a reference may be dropped before the next one is made."""

    def validate_correctness(self) -> Checked:
        return check(self.comparisons())


def check(comparisons: Iterable[TensorComparison]) -> Checked:
    """Not ok: something is not finite, or an error exceeds its tolerance."""
    worst, worst_name, wrong, num = 0.0, "", [], 0
    for comparison in comparisons:
        num += 1
        error = _error(comparison)
        share = (
            error / comparison.tolerance if comparison.tolerance else (0.0 if error == 0 else float("inf"))
        )
        if not share <= 1:  # NaN included
            wrong.append(
                f"{comparison.name}: error {error:.2g} of the largest value,"
                f" allowed {comparison.tolerance:.2g}"
            )
        elif share >= worst:
            worst, worst_name = share, f", the largest error {error:.2g} in {comparison.name}"
    if wrong:
        remainder = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Checked(ok=False, detail=wrong[0] + remainder)
    return Checked(ok=True, detail=f"{num} results agree with their references{worst_name}")


def _error(comparison: TensorComparison) -> float:
    assert comparison.actual.shape == comparison.reference.shape, (
        f"{comparison.name}: {comparison.actual.shape} {comparison.reference.shape}"
    )
    if not bool(torch.isfinite(comparison.actual).all()):
        return float("nan")
    scale = float(comparison.reference.abs().max())
    error = float((comparison.actual.to(comparison.reference.dtype) - comparison.reference).abs().max())
    return error / scale if scale else error


def product_comparison(name: str, a: Tensor, b: Tensor, c: Tensor) -> TensorComparison:
    """Comparison of c with a b by three matrix-vector products in float64: c v = a (b v) for signs v
    (Freivalds). Every row is checked; the rounding of c limits what can be told, as tolerance."""
    signs = torch.ones(b.shape[1], dtype=torch.float64, device=b.device)
    signs[torch.arange(len(signs), device=b.device) * 7 % 11 < 5] = -1.0
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3}.get(c.dtype, 2e-2)
    return TensorComparison(name, _times(c, signs), _times(a, _times(b, signs)), tolerance)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """The product in float64, some rows at a time: a large matrix has no room for a copy in float64."""
    return torch.cat([rows.double() @ vector for rows in matrix.split(1024)])


def rate_alone_gb_s(pieces: Iterable[Piece], name: str, num_bytes: float) -> float | None:
    """Rate of pieces of num_bytes each, where every piece followed the one before it; None without any."""
    each_ms = [piece.duration_ms for piece in pieces if piece.leg == ALONE and piece.name == name]
    return num_bytes / (median(each_ms) * 1e6) if each_ms else None


def matrix_work(dtype: torch.dtype, flops: float) -> DeviceWork:
    """flops of matrix multiplies in this type."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    fp32 = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return DeviceWork({names.get(dtype, fp32): flops})
