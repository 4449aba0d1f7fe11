"""What attention costs, forward and backward."""

from aorta.projection.sdpa.backend import AttentionSize, SdpaBackend, get_sdpa_simulation_backend

__all__ = ["AttentionSize", "SdpaBackend", "get_sdpa_simulation_backend"]
