"""The interface of GEMM models and their names.

A GEMM is D[m, n] = A[m, k] . B[k, n], batch of them at once. Layout is as in cuBLAS after the column-major
turn: TN is x[m, k] . w[n, k]^T (forward), NN is dgrad, NT is wgrad.
"""

from importlib.metadata import entry_points
from typing import Any, Protocol

import msgspec

from aorta.config.strict import near
from aorta.errors import ProjectionError
from aorta.hardware import Hardware, dtype_bytes
from aorta.projection.estimate import Estimate

ENTRY_POINTS = "aorta.gemm_backends"
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
    ) -> Estimate: ...


def get_gemm_simulation_backend(name: str, hardware: Hardware, **options: Any) -> GemmBackend:
    """The GEMM model of that name: tile, roofline, table (path=...), origami, or one of an entry point.

    A package adds its own under the entry point group aorta.gemm_backends: a callable that takes the
    hardware and the options.
    """
    # A model is imported when it is asked for: one of them needs a package that may be absent.
    if name == "tile":
        from aorta.projection.gemm.tile import TileGemm

        return TileGemm(hardware, **options)
    if name == "roofline":
        from aorta.projection.gemm.roofline import RooflineGemm

        return RooflineGemm(hardware, **options)
    if name == "table":
        from aorta.projection.gemm.table import TableGemm

        if "path" not in options:
            raise ProjectionError("the GEMM backend table needs path=FILE of measurements; tile needs none")
        return TableGemm(hardware, **options)
    if name == "origami":
        from aorta.projection.gemm.origami import OrigamiGemm

        return OrigamiGemm(hardware, **options)
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ["tile", "roofline", "table", "origami", *found]
        raise ProjectionError(f"{name!r} is not a GEMM backend{near(name, known)}")
    backend: GemmBackend = found[name].load()(hardware, **options)
    return backend
