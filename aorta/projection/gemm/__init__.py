"""What a matrix multiply costs, from several models behind one interface."""

from aorta.projection.gemm.backend import GemmBackend, GemmSize, get_gemm_simulation_backend

__all__ = ["GemmBackend", "GemmSize", "get_gemm_simulation_backend"]
