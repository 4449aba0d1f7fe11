"""Comparison of a workload's results with a reference."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from aorta.queues.workload import CorrectnessCheck, Workload


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

    def validate_correctness(self) -> CorrectnessCheck:
        return check(self.comparisons())


def check(comparisons: Iterable[TensorComparison]) -> CorrectnessCheck:
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
        return CorrectnessCheck(False, wrong[0] + remainder)
    return CorrectnessCheck(True, f"{num} results agree with their references{worst_name}")


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
