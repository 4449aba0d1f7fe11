"""Time of attention, forward and backward."""

from aorta.projection.kernels.sdpa.backend import get_sdpa_simulation_backend
from aorta.projection.kernels.sdpa.size import AttentionSize, SdpaBackend

__all__ = ["AttentionSize", "SdpaBackend", "get_sdpa_simulation_backend"]
