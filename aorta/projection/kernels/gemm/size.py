"""A GEMM's size, and the interface of what prices it.

A GEMM is D[m, n] = A[m, k] . B[k, n], batch of them at once. Layout is as in cuBLAS after the column-major
turn: TN is x[m, k] . w[n, k]^T (forward), NN is dgrad, NT is wgrad.
"""

from typing import Protocol

import msgspec

from aorta.errors import ProjectionError
from aorta.hardware import dtype_bytes
from aorta.projection.kernels.estimate import KernelEstimate

LAYOUTS = ("TN", "NN", "NT")


class GemmSize(msgspec.Struct, frozen=True):
    """A checked problem."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "TN"
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            if getattr(self, name) < 1:
                raise ProjectionError(f"a GEMM needs {name} of at least 1, got {getattr(self, name)}")
        if self.layout not in LAYOUTS:
            raise ProjectionError(f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        dtype_bytes(self.dtype)

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes_read(self) -> float:
        """A and B once."""
        return dtype_bytes(self.dtype) * self.batch * (self.m * self.k + self.k * self.n)

    @property
    def bytes_written(self) -> float:
        """D once. FP8 and FP4 GEMMs write bf16."""
        return max(2.0, dtype_bytes(self.dtype)) * self.batch * self.m * self.n


class GemmBackend(Protocol):
    """A model of GEMM time on one GPU."""

    def simulate(
        self, m: int, n: int, k: int, dtype: str, layout: str = "TN", batch: int = 1
    ) -> KernelEstimate: ...
