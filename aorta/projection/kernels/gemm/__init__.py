"""Time of a matrix multiply, from several models behind one interface (aorta.projection.kernels.backends)."""
