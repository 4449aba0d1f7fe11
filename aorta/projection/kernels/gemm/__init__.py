"""Time of a matrix multiply, from several models behind one interface."""

from aorta.projection.kernels.gemm.backend import get_gemm_simulation_backend
from aorta.projection.kernels.gemm.size import GemmBackend, GemmSize

__all__ = ["GemmBackend", "GemmSize", "get_gemm_simulation_backend"]
