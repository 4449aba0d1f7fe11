"""Time of an attention, from several models behind one interface (aorta.projection.kernels.backends)."""
